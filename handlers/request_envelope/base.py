"""The base class of envelopes around a handler's entry point."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.torchserve_api.completed_context import completed


class BaseEnvelope(ABC):
    """Converts the requests of a batch for a handler, and its results."""

    def __init__(self, handle_fn: Callable[[Any, Context], Any]) -> None:
        self._handle_fn = handle_fn
        self.context: Any = None  # of the current batch

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch; an empty batch and an empty result are not converted."""
        self.context = completed(context)
        results = self._handle_fn(self.parse_input(data) if data else data, self.context)
        return self.format_output(results) if results else results

    @abstractmethod
    def parse_input(self, data: Any) -> Any:
        """Return the handler's list for a batch, which has a dict per request."""

    @abstractmethod
    def format_output(self, data: Any) -> Any:
        """Return the list of answers, one per request, for the handler's list."""
