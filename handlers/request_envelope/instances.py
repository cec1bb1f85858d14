"""The base of envelopes whose requests contain several instances each.

The handler gets the instances of a batch as one list. TorchServe's KServe envelopes read only the
first request. Here:

* A batch of one is as in TorchServe: all results belong to that request.
* A request that cannot be parsed, or a result that cannot be encoded, does not affect the others.
* In a larger batch, a number of results other than that of instances fails the batch.
* A request without instances is answered without the handler, a description by the handler alone.
* During the call, the context has each instance's request at the instance's index.
"""

import json
import logging
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from marserve.backend.context import Context
from marserve.backend.errors import failed_request, poison_of, sentence_of
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.base import BaseEnvelope
from marserve.handlers.torchserve_api.completed_context import completed
from marserve.handlers.utils import value_of

logger = logging.getLogger(__name__)

_MAX_REASON = 200


def parsed_body(row: Any) -> Any:
    """Return a request's content, with JSON text parsed."""
    body = value_of(row)
    return parsed_json(body) if isinstance(body, bytes | bytearray | str) else body


def parsed_json(text: bytes | bytearray | str, subject: str = "The body is") -> Any:
    """Parse JSON; UnusableInput, about ``subject``, if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnusableInput("The JSON is nested too deeply.") from error
    except ValueError as error:
        raise UnusableInput(f"{subject} not JSON: {error}") from error


def listed_instances(document: Any) -> list[Any]:
    """Return the list ``instances`` of a request; UnusableInput if it is missing."""
    if not isinstance(document, dict) or not isinstance(document.get("instances"), list):
        raise UnusableInput('The body must be a JSON object with a list: {"instances": [...]}.')
    instances: list[Any] = document["instances"]
    return instances


class InstancesEnvelope(BaseEnvelope):
    """An envelope for lists of instances; subclasses parse a request and format its answer."""

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._instances: list[list[Any]] = []  # by request; empty if it is refused
        self._refusals: dict[int, str] = {}

    def handle(self, data: Any, context: Context) -> Any:
        """Answer a batch; without instances, the handler is not called."""
        self.context = completed(context)
        if not data or self.context.get_request_header(0, "describe") == "True":
            return self._handle_fn(data, context)
        instances = self.parse_input(data)
        if not instances:
            return self._answer_all([])
        owners = [index for index, rows in enumerate(self._instances) for _ in rows]
        # A subclass that replaces `parse_input` has no instances here, and keeps the context.
        is_one_each = owners == list(range(len(self._instances)))
        with nullcontext() if is_one_each else self.context.limited_to(owners):
            results = self._handle_fn(instances, self.context)
        return self.format_output(results) if results else results

    @abstractmethod
    def instances_of(self, row: Any) -> list[Any]:
        """Return the instances of one request, a dict.

        Exceptions refuse it with 400; the client receives the message of an `UnusableInput`.
        """

    @abstractmethod
    def answer(self, results: Any, index: int) -> Any:
        """Return the answer to the request at ``index`` for the results of its instances."""

    def parse_input(self, data: Any) -> list[Any]:
        """Return the instances of all requests."""
        self._refusals = {}
        self._instances = [self._parse(row, index) for index, row in enumerate(data)]
        return [instance for rows in self._instances for instance in rows]

    def format_output(self, data: Any) -> list[Any]:
        """Return one answer per request."""
        if len(self._instances) == 1:
            return [self.answer(data, 0)]
        expected = sum(map(len, self._instances))
        if not isinstance(data, list) or len(data) != expected:
            raise ValueError(f"The handler must return {expected} results, one per instance")
        return self._answer_all(data)

    def failure(self, status: int, kind: str, message: str, index: int) -> dict[str, Any]:
        """Return the answer to a request that failed."""
        self.context.set_response_status(status, "", index)
        self.context.set_response_content_type(index, "application/json")
        return {"code": status, "type": kind, "message": message}

    def _answer_all(self, results: Iterable[Any]) -> list[Any]:
        remaining = iter(results)
        return [
            self.failure(400, "BadRequestException", self._refusals[index], index)
            if index in self._refusals
            else self._answer_one([next(remaining) for _ in rows], index)
            for index, rows in enumerate(self._instances)
        ]

    def _answer_one(self, results: list[Any], index: int) -> Any:
        try:
            return self.answer(results, index)
        except Exception as error:  # a bad result concerns its request only
            if len(self._instances) == 1 or isinstance(error, MemoryError) or poison_of(error):
                raise
            id_ = self.context.get_request_id(index)
            logger.warning("The results of request %s cannot be sent.", id_, exc_info=True)
            message = failed_request(id_)
            return self.failure(503, "InternalServerException", message, index)

    def _parse(self, row: Any, index: int) -> list[Any]:
        try:
            return self.instances_of(row)
        except MemoryError:
            raise
        except UnusableInput as error:
            logger.info("A request is not in the format of the envelope: %s", error)
            self._refusals[index] = str(error)
        except Exception as error:  # hostile input raises anything
            logger.warning("A request is not in the format of the envelope.", exc_info=True)
            why = sentence_of(error)[:_MAX_REASON]
            self._refusals[index] = f"The request is not in the format of the envelope: {why}"
        return []
