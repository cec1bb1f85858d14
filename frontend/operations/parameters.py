"""Parameters of a request, by name: text of a query, or values of a JSON object or a message.

As in TorchServe, text counts as absent where a number is expected, and a warning is logged. A
number out of range is refused, though TorchServe accepted it.
"""

import logging
import re
import reprlib
from collections.abc import Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from marserve.frontend.configuration.setting import wrong_value
from marserve.frontend.configuration.setting_kinds import MAX_NUMBER, plain_number
from marserve.frontend.errors import BadRequest

logger = logging.getLogger(__name__)

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?", re.IGNORECASE)


class Parameters:
    """The parameters of a request, each of which may be missing."""

    def __init__(self, values: Mapping[str, Any], passed_over: Iterable[str] = ()) -> None:
        self._values = values
        self.passed_over = sorted(passed_over)  # names in the query beside a body of JSON

    @property
    def names(self) -> AbstractSet[str]:
        """The names of all parameters."""
        return self._values.keys()

    def value(self, name: str) -> Any:
        """Return the value as it was sent, or None."""
        return self._values.get(name)

    def text(self, name: str) -> str:
        """Return a text; empty if it is absent or of another type."""
        value = self._values.get(name)
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        """Return whether the parameter has a value."""
        return self._values.get(name) is not None

    def integer(self, name: str, default: int) -> int:
        """Return a number; the default if it is absent or no number."""
        value = self._values.get(name)
        if value is None:
            return default
        number = plain_number(value)
        if type(number) is not int or abs(number) > MAX_NUMBER:
            text = reprlib.repr(value)
            logger.warning("Parameter %s=%s is not an integer, %d is used.", name, text, default)
            return default
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a switch; only "true" is on."""
        value = self._values.get(name)
        return default if value is None else str(value).lower() == "true"

    def number(self, name: str, unset: Container[int] = ()) -> int | None:
        """Return a whole number; None if it is absent, text, or in ``unset``.

        Raises BadRequest for a number that is not whole or too large, or for another JSON value.
        """
        value = plain_number(self._values.get(name))
        if isinstance(value, str) and not _NUMBER.fullmatch(value.strip()):
            text = reprlib.repr(value)
            logger.warning("Parameter %s=%s is not a number, it counts as absent.", name, text)
            return None
        if value is None:
            return None
        if type(value) is not int or abs(value) > MAX_NUMBER:
            raise BadRequest(wrong_value(name, value, f"a whole number, at most {MAX_NUMBER}"))
        return None if value in unset else value

    def at_least(self, name: str, minimum: int) -> int | None:
        """Return a `number` of at least ``minimum``, else raise BadRequest; -1 counts as absent."""
        value = self.number(name, unset=(-1,))
        if value is not None and value < minimum:
            raise BadRequest(wrong_value(name, value, f"a whole number, {minimum} or more"))
        return value
