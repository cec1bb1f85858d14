"""What the formats have in common whose requests hold several instances each.

All instances of a batch go to the handler as one list; its results, one per instance, are dealt out
again. TorchServe's KServe envelopes read the first request only. Here each request of a batch is
parsed and answered by itself, and these promises hold:

* A batch of one is as in TorchServe: all results are that request's, however many there are.
* A request that cannot be parsed is answered with 400 and why, where TorchServe failed with 503.
  It costs only itself its answer, and so does a result that cannot be written in the format.
* In a larger batch another number of results than of instances fails the batch, since nobody can
  tell whose they are.
* A request of no instances is answered without the handler, and one to describe the model by the
  handler alone.
* While it works, the handler sees each instance's own request at the instance's place in the
  context: headers are found, and a status set by index reaches the right client.
"""

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import poison_of, sentence_of
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.base import BaseEnvelope
from marserve.handlers.utils import value_of

logger = logging.getLogger(__name__)

_MAX_REASON = 200


def parsed_body(row: Any) -> Any:
    """Return what a request holds, parsed if it is JSON text still.

    Raises:
        UnusableInput: It is no JSON.
    """
    body = value_of(row)
    return parsed_json(body) if isinstance(body, bytes | bytearray | str) else body


def parsed_json(text: bytes | bytearray | str) -> Any:
    """Parse JSON.

    Raises:
        UnusableInput: It is none, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnusableInput("The JSON is nested too deeply.") from error
    except ValueError as error:
        raise UnusableInput(f"The body is not JSON: {error}") from error


def listed_instances(document: Any) -> list[Any]:
    """Return the list of a request's ``instances``.

    Raises:
        UnusableInput: There is none.
    """
    if not isinstance(document, dict) or not isinstance(document.get("instances"), list):
        raise UnusableInput('The body must be a JSON object with a list: {"instances": [...]}.')
    instances: list[Any] = document["instances"]
    return instances


class _NoInstances(Exception):
    """There is nothing in a batch for the handler."""


class InstancesEnvelope(BaseEnvelope):
    """An envelope around lists of instances; a format says what one request is and its answer."""

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._counts: list[int | None] = []  # instances per request; None could not be parsed
        self._failures: dict[int, UnusableInput] = {}

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch; without the handler if there are no instances in it."""
        if data and context.get_request_header(0, "describe") == "True":
            return self._handle_fn(data, context)
        try:
            return super().handle(data, context)
        except _NoInstances:
            return self._dealt_out([])

    @abstractmethod
    def instances_of(self, row: Any) -> list[Any]:
        """Parse one request, the handler's dict of it.

        Any exception refuses it, with 400; the sentence of an `UnusableInput` is the client's.
        """

    @abstractmethod
    def answer(self, results: Any, index: int) -> Any:
        """Make the answer of the request at ``index`` of its instances' results."""

    def parse_input(self, data: Any) -> list[Any]:
        """Parse the requests; return the instances of all."""
        parsed = [self._parsed(row) for row in data]
        self._failures = {i: rows for i, rows in enumerate(parsed) if isinstance(rows, Exception)}
        self._counts = [None if isinstance(rows, Exception) else len(rows) for rows in parsed]
        if not any(self._counts):
            raise _NoInstances
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
        return self._dealt_out(data)

    def failure(self, status: int, kind: str, message: str, index: int) -> dict[str, Any]:
        """Make the answer of a request that failed."""
        self.context.set_response_status(status, "", index)
        self.context.set_response_content_type(index, "application/json")
        return {"code": status, "type": kind, "message": message}

    def _dealt_out(self, results: Iterable[Any]) -> list[Any]:
        remaining = iter(results)
        return [
            self.failure(400, "BadRequestException", str(self._failures[index]), index)
            if count is None
            else self._answered([next(remaining) for _ in range(count)], index)
            for index, count in enumerate(self._counts)
        ]

    def _answered(self, results: list[Any], index: int) -> Any:
        try:
            return self.answer(results, index)
        except Exception as error:  # what the handler made of this request is its alone
            if len(self._counts) == 1 or isinstance(error, MemoryError) or poison_of(error):
                raise
            logger.warning("The results of request %d cannot be sent.", index, exc_info=True)
            return self.failure(503, "InternalServerException", "Prediction failed", index)

    def _parsed(self, row: Any) -> list[Any] | UnusableInput:
        try:
            return self.instances_of(row)
        except MemoryError:
            raise
        except UnusableInput as error:
            logger.info("A request is not in the format of the envelope: %s", error)
            return error
        except Exception as error:  # whatever a client sent instead of the format
            logger.warning("A request is not in the format of the envelope.", exc_info=True)
            why = sentence_of(error)[:_MAX_REASON]
            return UnusableInput(f"The request is not in the format of the envelope: {why}")

    def _view(self) -> AbstractContextManager[None]:
        owners = [i for i, count in enumerate(self._counts) for _ in range(count or 0)]
        if owners == list(range(len(self._counts))):
            return nullcontext()
        view: AbstractContextManager[None] = self.context.limited_to(owners)
        return view
