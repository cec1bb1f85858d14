"""``body``: the handler gets what a request holds, without the dict around it."""

from typing import Any

from marserve.handlers.request_envelope.base import BaseEnvelope
from marserve.handlers.utils import value_of


class BodyEnvelope(BaseEnvelope):
    """Gives the handler each request's ``data`` or ``body``; results stay as they are."""

    def parse_input(self, data: Any) -> list[Any]:
        """Return what the requests hold."""
        return [value_of(row) for row in data]

    def format_output(self, data: Any) -> Any:
        """Return the results."""
        return data
