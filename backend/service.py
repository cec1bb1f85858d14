"""A loaded model: a batch of inputs in, as many predictions out.

The handler is foreign code, so this is where `Any` and the blind except are at home. Whatever it
does short of ending the process becomes a reply: a status and a sentence for the clients, a
traceback for the model log. An exception speaks for the whole batch (the handler saw it as one); a
result that cannot be sent speaks only for its own request.
"""

import io
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.errors import PredictionException
from marserve.backend.protocol import Buffer, Input, Part, Prediction, Reply

logger = logging.getLogger(__name__)

EntryPoint = Callable[[Any, Context], Any]

_JSON_TYPE = "application/json"
_TEXT_PREFIX = "text"


class Service:
    """A model that is ready to predict.

    Args:
        entry_point: The handler's ``handle(data, context)``.
        context: The one context of this process, given to the handler with every batch.
        decode_input: Whether JSON and text parts reach the handler decoded (else as bytearray).
        max_response_bytes: Longest body of one prediction.
    """

    def __init__(
        self,
        entry_point: EntryPoint,
        context: Context,
        *,
        decode_input: bool = True,
        max_response_bytes: int = 6_553_500,
    ) -> None:
        self._entry_point = entry_point
        self._context = context
        self._metrics = context.metrics
        self._decode_input = decode_input
        self._max_response_bytes = max_response_bytes

    def predict(self, inputs: Sequence[Input]) -> Reply:
        """Run the handler once over the batch."""
        data = [self._row(one) for one in inputs]
        self._context.request_ids = {i: one.id for i, one in enumerate(inputs)}
        # Our own list: the context is the handler's to play with.
        processors = [RequestProcessor(_headers(one)) for one in inputs]
        self._context.request_processor = list(processors)
        started = time.perf_counter()
        try:
            results = self._entry_point(data, self._context)
        except Exception as error:  # foreign code
            logger.warning("Invoking custom service failed.", exc_info=True)
            code, message = failure_of(error)
            return Reply(code, message, metrics=self._metrics.drain())
        handler_ms = (time.perf_counter() - started) * 1000
        reply = self._reply(results, processors)
        reply.handler_ms = round(handler_ms, 3)
        return reply

    def _row(self, one: Input) -> dict[str, Any]:
        """The handler's dict of one request: part name to decoded value."""
        if not self._decode_input:
            return {part.name: part.body for part in one.parts}
        return {part.name: _decoded(part) for part in one.parts}

    def _reply(self, results: Any, processors: Sequence[RequestProcessor]) -> Reply:
        metrics, expected = self._metrics.drain(), len(processors)
        if isinstance(results, list):
            results = list.copy(results)  # a subclass may lie about its length and its items
        if not isinstance(results, list):
            logger.warning("The handler returned %s, not a list.", type(results).__name__)
            return Reply(503, "Invalid model predict output", metrics=metrics)
        if len(results) != expected:
            logger.warning(
                "The handler returned %d results for %d requests.", len(results), expected
            )
            return Reply(503, "number of batch response mismatched", metrics=metrics)
        return Reply(
            predictions=[self._prediction(i, one, processors[i]) for i, one in enumerate(results)],
            metrics=metrics,
        )

    def _prediction(self, index: int, result: Any, processor: RequestProcessor) -> Prediction:
        try:
            body = encode_result(result)
        except Exception:  # foreign objects decide how they serialise
            logger.warning("The result of request %d cannot be sent.", index, exc_info=True)
            return _error(503, "Unsupported model output data type.")
        if len(body) > self._max_response_bytes:
            return _error(
                500,
                f"Message size exceed limit: {len(body)}. Raise max_response_size "
                f"(now {self._max_response_bytes}).",
            )
        status: Any = processor.get_response_status_code()  # the handler may have set anything
        if not isinstance(status, int):
            return _error(503, f"The handler set the status {status!r}.")
        reason: Any = processor.get_response_status_phrase() or ""
        headers: Any = processor.get_response_headers()
        if not isinstance(reason, str) or not _is_text_mapping(headers):
            return _error(503, "The handler set a reason phrase or a header that is no text.")
        return Prediction(body, status, reason, headers)


def failure_of(error: BaseException) -> tuple[int, str]:
    """Status and sentence that TorchServe's clients get for an exception of a handler."""
    if isinstance(error, PredictionException):
        return _batch_status(error.error_code), str(error.message)
    if isinstance(error, MemoryError) or "CUDA" in _text_of(error):
        return 507, "Out of resources"
    return 503, "Prediction failed"


def _batch_status(code: Any) -> int:
    """The status of a batch that failed: 413 becomes 507; what says success or nothing, 500."""
    if not isinstance(code, int) or not 200 < code <= 999:
        return 500
    return 507 if code == 413 else int(code)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - an exception class of the author's
        return ""


def encode_result(result: Any) -> Buffer:
    """The body of one result: bytes raw, str as UTF-8, a tensor as ``torch.save``, else JSON.

    Raises:
        TypeError, ValueError: The result is none of these.
    """
    if isinstance(result, bytes | bytearray):
        return result
    if isinstance(result, str):
        return str.encode(result)  # str's own: a subclass may have another
    torch = sys.modules.get("torch")  # a tensor exists only where torch was imported
    if torch is not None and isinstance(result, torch.Tensor):
        file = io.BytesIO()
        torch.save(result, file)
        return file.getvalue()
    return json.dumps(result, indent=2).encode()


def _error(status: int, message: str) -> Prediction:
    body = {"code": status, "type": "InternalServerException", "message": message}
    return Prediction(
        json.dumps(body, indent=2).encode() + b"\n", status, "", {"content-type": _JSON_TYPE}
    )


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )


def _headers(one: Input) -> dict[str, Any]:
    """What the handler sees as headers: one entry per part, and the request's own over them."""
    described: dict[str, Any] = {
        part.name: {"content-type": part.content_type} for part in one.parts
    }
    described.update(one.headers)
    return described


def _decoded(part: Part) -> Any:
    media_type = part.content_type.partition(";")[0].strip()
    try:
        if media_type == _JSON_TYPE:
            return json.loads(bytes(part.body))
        if media_type.startswith(_TEXT_PREFIX):
            return bytes(part.body).decode()
    except (ValueError, RecursionError):
        logger.warning("Part %r is not the %s it says; passed on as bytes.", part.name, media_type)
    return part.body
