"""Reads the parameters of a request, from its query or JSON body, and the options in its headers.

As in TorchServe a text that is no number counts as not given where a number is wanted, and a
warning is logged. A number that makes no sense is refused, though TorchServe took it: no worker
answers within 0 s, and no batch has -5 requests.

    X-Timeout-Ms: 250      answer no later than so many milliseconds after the request has arrived
    X-Priority: high       answer before others, or after them (high, normal, low; in any case)

Any request for a prediction may have the two headers. A timeout may only shorten what the model
allows (``clientTimeoutInMills``). Handlers see the headers as all others.
"""

import logging
import math
import re
import reprlib
from collections.abc import Container, Mapping
from typing import Any
from urllib.parse import parse_qsl

from marserve.frontend.batching.jobs import Priority
from marserve.frontend.configuration.setting_kinds import MAX_NUMBER
from marserve.frontend.configuration.values import plain_number
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.router import HttpRequest
from marserve.frontend.models.predict_request import NO_OPTIONS, RequestOptions

logger = logging.getLogger(__name__)

_MAX_DIGITS = 20
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)
_MILLISECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")
_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
_repr = reprlib.Repr()
_repr.maxstring = 60


class Parameters:
    """The parameters of a request: text from a query, or JSON values; each may be missing."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def value(self, name: str) -> Any:
        """The value as it came, or None."""
        return self._values.get(name)

    def text(self, name: str) -> str:
        """A text; empty when it is missing or something else."""
        value = self._values.get(name)
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        """Whether there is a value at all."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int) -> int:
        """A number; the default when it is missing or no number."""
        value = self._values.get(name)
        if value is None:
            return default
        try:
            number = int(str(value)[:_MAX_DIGITS])
        except ValueError:
            number = MAX_NUMBER + 1
        if abs(number) > MAX_NUMBER:
            text = reprlib.repr(value)
            logger.warning("Parameter %s=%s is no integer, %d is taken.", name, text, default)
            return default
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """A switch; what is not "true" is off."""
        value = self._values.get(name)
        return default if value is None else str(value).lower() == "true"

    def number(self, name: str, unset: Container[int] = ()) -> int | None:
        """A whole number; None when it is missing, a text that is no number, or in ``unset``.

        Raises:
            BadRequest: A number that is not whole or too large, or a JSON value of another type.
        """
        value = plain_number(self._values.get(name))
        if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
            text = reprlib.repr(value)
            logger.warning("Parameter %s=%s is no number, it counts as not given.", name, text)
            return None
        if value is None:
            return None
        if type(value) is not int or abs(value) > MAX_NUMBER:
            raise _refusal(name, value, f"a whole number, at most {MAX_NUMBER}")
        return None if value in unset else value

    def at_least(self, name: str, minimum: int) -> int | None:
        """A `number` from ``minimum`` on, else BadRequest; -1 counts as not given, too."""
        value = self.number(name, unset=(-1,))
        if value is not None and value < minimum:
            raise _refusal(name, value, f"a whole number, {minimum} or more")
        return value


def _refusal(name: str, value: object, rule: str) -> BadRequest:
    text = value[:80] if isinstance(value, str) else reprlib.repr(value)
    return BadRequest(f"{name}={text}: it is {rule}.")


def query_parameters(request: HttpRequest) -> Parameters:
    """The parameters in the query; of several with one name the first counts."""
    return Parameters(dict(reversed(parse_qsl(request.query, keep_blank_values=True))))


def read_request_options(headers: Mapping[str, str]) -> RequestOptions:
    """The options in the headers of a request, which are looked up in lower case.

    Raises:
        BadRequest: A value is none of those allowed.
    """
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
