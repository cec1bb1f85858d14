"""Named values of a request: of its query, or of the JSON object in its body.

As in TorchServe a number that is none counts as not given; the log tells.
"""

import logging
import reprlib
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from marserve.frontend.api.door import Visit
from marserve.frontend.models.model_yaml import MAX_NUMBER

logger = logging.getLogger(__name__)

_MOST_DIGITS = 20


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

    def whole(self, name: str, default: int) -> int:
        """A number, the default when it is absent or none."""
        value = self._values.get(name)
        if value is None:
            return default
        try:
            number = int(str(value)[:_MOST_DIGITS])
        except ValueError:
            number = MAX_NUMBER + 1
        if abs(number) > MAX_NUMBER:
            shown = reprlib.repr(value)
            logger.warning("Parameter %s=%s is no integer, %d is taken.", name, shown, default)
            return default
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        """A switch; what is not "true" is off."""
        value = self._values.get(name)
        return default if value is None else str(value).lower() == "true"

    def at_least(self, name: str, minimum: int) -> int | None:
        """A number, None when absent or smaller (TorchServe's clients send -1 for "unset")."""
        value = self.whole(name, minimum - 1)
        return None if value < minimum else value


def query_parameters(visit: Visit) -> Parameters:
    """Those in the query; of several with one name the first counts."""
    query = visit.request.raw_path.partition("?")[2].partition("#")[0]
    return Parameters(dict(reversed(parse_qsl(query, keep_blank_values=True))))
