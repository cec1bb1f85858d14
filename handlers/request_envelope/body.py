"""``body``: the handler gets the content of a request without its dict."""

from typing import Any

from marserve.handlers.request_envelope.base import BaseEnvelope
from marserve.handlers.utils import value_of


class BodyEnvelope(BaseEnvelope):
    """Passes each request's ``data`` or ``body`` to the handler; results are unchanged."""

    def parse_input(self, data: Any) -> list[Any]:
        """Return the contents of the requests."""
        return [value_of(row) for row in data]

    def format_output(self, data: Any) -> Any:
        """Return the results."""
        return data
