"""Calls methods of the client of OpenAI.

Reads lines from standard input, each a list of calls, runs the calls of a line at the same time,
and writes a line with their results. Runs in the environment of the engine. A call has

    base_url: Where the API is.
    method: For example ``chat.completions.create``.
    arguments: The arguments by name.
    leave_after: The number of a stream's events after which the client closes it.

A result has ``value``, the events of a stream as ``events`` and the times of the first and the last
as ``times``, or the ``status``, the ``code`` and the ``body`` of an error.
"""

import json
import operator
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import openai


@cache
def _client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0)


def _result(call: dict[str, Any]) -> dict[str, Any]:
    method = operator.attrgetter(call["method"])(_client(call["base_url"]))
    try:
        value = method(**call.get("arguments", {}))
    except openai.APIStatusError as error:
        return {"status": error.status_code, "code": error.code, "body": error.body}
    if not isinstance(value, openai.Stream):
        return {"value": value.model_dump()}
    events, times = [], []
    for event in value:
        events.append(event.model_dump())
        times.append(time.monotonic())
        if len(events) == call.get("leave_after"):
            value.close()
            break
    return {"events": events, "times": [times[0], times[-1]]}


with ThreadPoolExecutor(64) as threads:
    for line in sys.stdin:
        print(json.dumps(list(threads.map(_result, json.loads(line)))), flush=True)
