"""The base class of envelopes around a handler's entry point."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.torchserve_api.completed_context import CompletedContext


class BaseEnvelope(ABC):
    """Converts the requests of a batch for a handler, and its results."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None  # of the current batch

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch; an empty batch and an empty result are not converted."""
        self.context = context if isinstance(context, Context) else CompletedContext(context)
        results = self.call_handler(self.parse_input(data) if data else data)
        return self.format_output(results) if results else results

    def call_handler(self, rows: Any) -> Any:
        """Call the handler with the result of `parse_input`."""
        return self._handle_fn(rows, self.context)

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Return the handler's list for a batch, which has a dict per request."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Return the list of answers, one per request, for the handler's list."""
