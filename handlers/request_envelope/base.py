"""What an envelope is: something around a handler's entry point."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.torchserve_api.completed_context import CompletedContext


class BaseEnvelope(ABC):
    """Unwraps the requests of a batch for a handler, and wraps its results."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None  # of the batch at hand

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch. An empty batch is passed on, and an empty result back, as it is."""
        self.context = context if isinstance(context, Context) else CompletedContext(context)
        results = self.call_handler(self.parse_input(data) if data else data)
        return self.format_output(results) if results else results

    def call_handler(self, rows: Any) -> Any:
        """Call the handler with what `parse_input` made of the batch."""
        return self._handle_fn(rows, self.context)

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Make the list that the handler expects of the batch, a list with a dict per request."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Make the list of answers, one per request, of the handler's list."""
