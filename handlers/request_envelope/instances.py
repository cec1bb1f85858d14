"""What the formats have in common whose requests hold several instances each.

All instances of a batch go to the handler as one list; its results, one per instance, are dealt out
again. TorchServe's KServe envelopes read the first request only. Here each request of a batch is
parsed and answered by itself, and these promises hold:

* A batch of one is as in TorchServe: all results are that request's, however many there are.
* In a larger batch a request that cannot be parsed costs only itself its answer, and another number
  of results than of instances fails the batch, since nobody can tell whose they are.
* While it works, the handler sees each instance's own request at the instance's place in the
  context: headers are found, and a status set by index reaches the right client.
"""

import json
import logging
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.base import BaseEnvelope
from marserve.handlers.utils import value_of

logger = logging.getLogger(__name__)


def parsed_body(row: Any) -> Any:
    """Return what a request holds, parsed if it is JSON text still."""
    body = value_of(row)
    return json.loads(body) if isinstance(body, bytes | bytearray | str) else body


class _NoneUsable(Exception):
    """No request of a batch can be parsed, and some client gets the reason."""


class InstancesEnvelope(BaseEnvelope):
    """An envelope around lists of instances; a format says what one request is and its answer."""

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._counts: list[int | None] = []  # instances per request; None could not be parsed
        self._failures: dict[int, Exception] = {}

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch; one of nothing but unusable requests without the handler."""
        try:
            return super().handle(data, context)
        except _NoneUsable:
            return [self.refusal(index) for index in range(len(data))]

    @abstractmethod
    def instances_of(self, row: Any) -> list[Any]:
        """Parse one request, the handler's dict of it.

        Any exception refuses it. The client gets the sentence of an `UnusableInput` (400), of
        others only that the prediction failed (503), as in TorchServe.
        """

    @abstractmethod
    def answer(self, results: Any, index: int) -> Any:
        """Make the answer of the request at ``index`` of its instances' results."""

    def parse_input(self, data: Any) -> list[Any]:
        """Parse the requests; return the instances of all.

        Raises:
            Exception: No request can be parsed, and no client gets the reason; the first failure.
        """
        parsed = [self._parsed(row) for row in data]
        self._failures = {i: rows for i, rows in enumerate(parsed) if isinstance(rows, Exception)}
        if len(self._failures) == len(parsed):
            if any(isinstance(error, UnusableInput) for error in self._failures.values()):
                raise _NoneUsable
            raise self._failures[0]
        self._counts = [None if isinstance(rows, Exception) else len(rows) for rows in parsed]
        return [row for rows in parsed if not isinstance(rows, Exception) for row in rows]

    def call_handler(self, rows: Any) -> Any:
        """Call the handler, with a context that counts instances."""
        with self._view() if rows else nullcontext():
            return super().call_handler(rows)

    def format_output(self, data: Any) -> list[Any]:
        """Deal the results out to the requests.

        Raises:
            ValueError: In a batch of several requests, there is not one result per instance.
        """
        if len(self._counts) == 1:
            return [self.answer(data, 0)]
        expected = sum(count or 0 for count in self._counts)
        if not isinstance(data, list) or len(data) != expected:
            raise ValueError(f"The handler owes {expected} results, one per instance of the batch")
        remaining = iter(data)
        return [
            self.refusal(index)
            if count is None
            else self.answer([next(remaining) for _ in range(count)], index)
            for index, count in enumerate(self._counts)
        ]

    def refusal(self, index: int) -> dict[str, Any]:
        """Make the answer of a request that cannot be parsed."""
        failure = self._failures[index]
        status, kind, message = 503, "InternalServerException", "Prediction failed"
        if isinstance(failure, UnusableInput):
            status, kind, message = 400, "BadRequestException", str(failure)
        self.context.set_response_status(status, "", index)
        self.context.set_response_content_type(index, "application/json")
        return {"code": status, "type": kind, "message": message}

    def _parsed(self, row: Any) -> list[Any] | Exception:
        try:
            return self.instances_of(row)
        except Exception as error:  # whatever a client sent instead of the format
            logger.warning("A request is not in the format of the envelope.", exc_info=True)
            return error

    def _view(self) -> AbstractContextManager[None]:
        owners = [i for i, count in enumerate(self._counts) for _ in range(count or 0)]
        if owners == list(range(len(self._counts))):
            return nullcontext()
        view: AbstractContextManager[None] = self.context.limited_to(owners)
        return view
