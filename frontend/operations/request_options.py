"""Reads timeout and priority from the headers of a request.

    X-Timeout-Ms: 250      answer within 250 ms after the request has arrived
    X-Priority: high       answer before others, or after them (high, normal, low; in any case)

A timeout may only shorten the time that the model allows (``clientTimeoutInMills``). Handlers get
these headers, too.
"""

import math
import re
import reprlib
from collections.abc import Mapping

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.errors import BadRequest
from marserve.frontend.serving.predict_request import NO_OPTIONS, RequestOptions

_MILLISECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_repr = reprlib.Repr()
_repr.maxstring = 60


def read_request_options(headers: Mapping[str, str]) -> RequestOptions:
    """Return the options in headers with names in lower case, or raise BadRequest."""
    timeout, priority = headers.get("x-timeout-ms"), headers.get("x-priority")
    if timeout is None and priority is None:
        return NO_OPTIONS
    seconds, rank = math.inf, Priority.NORMAL
    if timeout is not None:
        seconds = float(timeout) / 1000 if _MILLISECONDS.fullmatch(timeout) else 0.0
        if not seconds:
            raise _header_refusal("X-Timeout-Ms", timeout, "a number of milliseconds above 0")
    if priority is not None:
        if priority.lower() not in _PRIORITIES:
            raise _header_refusal("X-Priority", priority, f"one of {', '.join(_PRIORITIES)}")
        rank = _PRIORITIES[priority.lower()]
    return RequestOptions(seconds, rank)


def _header_refusal(header: str, text: str, rule: str) -> BadRequest:
    return BadRequest(f"{header}={_repr.repr(text)}: it is {rule}.")
