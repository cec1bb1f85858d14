"""How soon a client wants its answer: two headers that any request for a prediction may carry.

    X-Timeout-Ms: 250      no later than so many milliseconds after the request has arrived
    X-Priority: high       before others, or after them (high, normal, low; in any case)

A timeout may only shorten what the model allows (``clientTimeoutInMills``). Handlers see the
headers as all others.
"""

import math
import re
from collections.abc import Mapping
from reprlib import Repr

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.errors import BadRequest
from marserve.frontend.models.predict_request import NO_OPTIONS, RequestOptions

TIMEOUT, PRIORITY = "X-Timeout-Ms", "X-Priority"

_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_repr = Repr()
_repr.maxstring = 60


def read_request_options(headers: Mapping[str, str]) -> RequestOptions:
    """What a request says of itself.

    Args:
        headers: Of the request, found in lower case.

    Raises:
        BadRequest: A value is none of those allowed.
    """
    timeout, priority = headers.get("x-timeout-ms"), headers.get("x-priority")
    if timeout is None and priority is None:
        return NO_OPTIONS
    return RequestOptions(
        math.inf if timeout is None else _seconds(timeout),
        Priority.NORMAL if priority is None else _priority(priority),
    )


def _seconds(text: str) -> float:
    milliseconds = float(text) if _NUMBER.fullmatch(text) else 0.0
    if not milliseconds:
        raise _refusal(TIMEOUT, text, "it is a number of milliseconds above 0")
    return milliseconds / 1000


def _priority(text: str) -> Priority:
    priority = _PRIORITIES.get(text.lower())
    if priority is None:
        raise _refusal(PRIORITY, text, f"it is one of {', '.join(_PRIORITIES)}")
    return priority


def _refusal(header: str, text: str, rule: str) -> BadRequest:
    return BadRequest(f"{header}={_repr.repr(text)}: {rule}.")
