"""Named values of a request: of its query, or of the JSON object in its body.

As in TorchServe a text that is no number counts as not given where a number is wanted, and the log
tells. A number that cannot be meant is refused, though TorchServe took it at its word: no worker
answers within 0 s, and no batch has -5 seats.
"""

import logging
import re
import reprlib
from collections.abc import Container, Mapping
from typing import Any
from urllib.parse import parse_qsl

from marserve.frontend.configuration.setting_kinds import MAX_NUMBER
from marserve.frontend.configuration.values import plain_number
from marserve.frontend.errors import BadRequest
from marserve.frontend.http.router import HttpRequest

logger = logging.getLogger(__name__)

#: What TorchServe's clients send for it.
UNSET = (-1,)

_MAX_DIGITS = 20
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


class Parameters:
    """Named values.

    Args:
        values: As text from a query, or as JSON values.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def value(self, name: str) -> Any:
        """As it came; None when absent."""
        return self._values.get(name)

    def text(self, name: str) -> str:
        """A text; empty when absent or something else."""
        value = self._values.get(name)
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        """Whether it is there at all."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int) -> int:
        """A number, the default when it is absent or none."""
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
        """A whole number; None when absent, a text that is no number, or one that stands for that.

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
        """A number from ``minimum`` on; None where it is not given, which -1 means as well.

        Raises:
            BadRequest: It is smaller, or see `number`.
        """
        value = self.number(name, UNSET)
        if value is not None and value < minimum:
            raise _refusal(name, value, f"a whole number, {minimum} or more")
        return value


def _refusal(name: str, value: object, rule: str) -> BadRequest:
    text = value[:80] if isinstance(value, str) else reprlib.repr(value)
    return BadRequest(f"{name}={text}: it is {rule}.")


def query_parameters(request: HttpRequest) -> Parameters:
    """Those in the query; of several with one name the first counts."""
    query = request.target.partition("?")[2].partition("#")[0]
    return Parameters(dict(reversed(parse_qsl(query, keep_blank_values=True))))
