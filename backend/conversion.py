"""From the inputs of a batch to what a handler is called with, and from its results to answers."""

import json
import logging
from typing import Any

from marserve.backend.context import RequestProcessor
from marserve.backend.failures import HANDLER_LOG, poison_of
from marserve.backend.protocol import Input, Part, Prediction
from marserve.backend.results import describe_unsendable, encode_result

logger = logging.getLogger(HANDLER_LOG)

_JSON_TYPE = "application/json"
_TEXT_PREFIX = "text"
_PHRASES = {500: "Internal Server Error", 503: "Service Unavailable"}


class Conversion:
    """How one model's inputs and results are converted.

    Args:
        decode_input: Whether JSON and text parts reach the handler decoded (else as bytearray).
        max_response_bytes: Longest body of one prediction.
    """

    def __init__(self, decode_input: bool, max_response_bytes: int) -> None:
        self._decode_input = decode_input
        self._max_response_bytes = max_response_bytes

    def row(self, request: Input) -> dict[str, Any]:
        """The handler's dict of one request: part name to decoded value."""
        if not self._decode_input:
            return {part.name: part.body for part in request.parts}
        return {part.name: _decoded(part) for part in request.parts}

    def prediction(self, place: int, result: Any, processor: RequestProcessor) -> Prediction:
        """One result with what the handler said about its answer."""
        try:
            body = encode_result(result)
        except Exception as error:  # foreign objects decide how they serialise
            if poison_of(error):  # a GPU's errors may show only when its results are fetched
                raise
            logger.warning("The result of request %d cannot be sent.", place, exc_info=True)
            why = describe_unsendable(result)
            return _error(503, f"Unsupported model output data type. {why}".rstrip())
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


def headers_of(request: Input) -> dict[str, Any]:
    """What the handler sees as headers: one entry per part, and the request's own over them."""
    headers: dict[str, Any] = {
        part.name: {"content-type": part.content_type} for part in request.parts
    }
    headers.update(request.headers)
    return headers


def _error(status: int, message: str) -> Prediction:
    body = {"code": status, "type": "InternalServerException", "message": message}
    reason = _PHRASES.get(status, "")
    headers = {"content-type": _JSON_TYPE}
    return Prediction(json.dumps(body, indent=2).encode() + b"\n", status, reason, headers)


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )


def _decoded(part: Part) -> Any:
    media_type = part.content_type
    try:
        if media_type == _JSON_TYPE:
            return json.loads(bytes(part.body))
        if media_type.startswith(_TEXT_PREFIX):
            return bytes(part.body).decode()
    except (ValueError, RecursionError):
        logger.warning("Part %r is not the %s it says; passed on as bytes.", part.name, media_type)
    return part.body
