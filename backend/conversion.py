"""Converts the inputs of a batch to the handler's data, and the handler's results to answers."""

import base64
import io
import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from marserve.backend.context import RequestProcessor
from marserve.backend.errors import HANDLER_LOG, poison_of
from marserve.backend.json_text import KEEP, NotJson, to_json
from marserve.backend.protocol import TENSORS_TYPE, Buffer, Input, Part, Prediction
from marserve.backend.tensors.answers import UnknownOutput
from marserve.backend.tensors.arrays import is_tensor
from marserve.backend.tensors.datatypes import UnusableTensor
from marserve.backend.tensors.requests import document_of, documents_of
from marserve.backend.tensors.wire import LENGTH_HEADER, UNREADABLE

logger = logging.getLogger(HANDLER_LOG)

_JSON_TYPE = "application/json"
_FAILURE = "InternalServerException"
# Clients and proxies accept less: http.client 100 headers and lines of 64 KiB, nginx 4 KiB in all.
_MAX_HEADERS = 1000
_MAX_HEAD_CHARACTERS = 1 << 16
_PHRASES = {400: "Bad Request", 500: "Internal Server Error", 503: "Service Unavailable"}


class Conversion:
    """Converts the inputs and results of one model.

    Args:
        decode_input: Whether the handler gets JSON and text parts decoded, not as bytearray.
        max_response_bytes: Of a prediction, for each row.
        dims: The dimensions that count rows, of inputs and of outputs.
        json_nan: How NaN and infinities are written in JSON (`json_text`).
        declared: The tensors that the model declares (`tensors.checks.is_declaration`).
    """

    def __init__(
        self,
        decode_input: bool,
        max_response_bytes: int,
        dims: Sequence[int] = (0, 0),
        json_nan: str = KEEP,
        declared: Mapping[str, Any] | None = None,
    ) -> None:
        self.declared = declared or {}
        self.json_nan = json_nan
        self._encode: Callable[[Any], Buffer] = encode_result
        if json_nan != KEEP:
            self._encode = partial(encode_result, json_nan=json_nan)
        self._decode_input = decode_input
        self._max_response_bytes = max_response_bytes
        self.dims = dims

    def row(self, request: Input) -> dict[str, Any]:
        """Return the dict of one request for the handler."""
        if not self._decode_input:
            return {part.name: _undecoded(part) for part in request.parts}
        return {part.name: _decoded(part) for part in request.parts}

    def rows(self, request: Input, count: int) -> list[dict[str, Any]]:
        """Return the dicts of the rows of an input."""
        if count == 1:
            return [self.row(request)]
        (part,) = request.parts
        lists = not self._decode_input
        documents = documents_of(part.body, count, self.dims[0], as_lists=lists)
        part.content_type = _JSON_TYPE  # for the handler
        return [{part.name: _as_json(each) if lists else each} for each in documents]

    def tensors(
        self,
        place: int,
        result: Any,
        processor: RequestProcessor,
        encode: Callable[[Any], tuple[bytes, int]],
        rows: int = 1,
    ) -> Prediction:
        """Return the answer to a request with tensors; an error of the handler is sent as it is.

        ``encode`` returns the body, and the number of its bytes that are JSON.
        """

        def body_of(result: Any) -> Buffer:
            status: Any = processor.get_response_status_code()
            if isinstance(status, int) and status >= 400:
                return self._encode(result)
            body, head_bytes = encode(result)
            processor.add_response_property(LENGTH_HEADER, str(head_bytes))
            kind = "application/octet-stream" if head_bytes < len(body) else _JSON_TYPE
            processor.add_response_property("content-type", kind)
            return body

        return self.prediction(place, result, processor, body_of, rows)

    def prediction(
        self,
        place: int,
        result: Any,
        processor: RequestProcessor,
        encode: Callable[[Any], Buffer] | None = None,
        rows: int = 1,
    ) -> Prediction:
        """Return the answer with one result, and the status and headers that the handler set."""
        max_bytes = rows * self._max_response_bytes
        try:
            body = (encode or self._encode)(result)
        except UnknownOutput as error:
            return tensor_error(400, str(error), "BadRequestException")
        except NotJson as error:
            logger.warning("The result of request %d cannot be sent: %s", place, error)
            return tensor_error(500, f"The handler's answer cannot be sent: {error}")
        except UnusableTensor as error:
            logger.warning("The result of request %d cannot be sent: %s", place, error)
            return tensor_error(503, f"The handler's answer cannot be sent: {error}.")
        except Exception as error:  # serialising may run foreign code
            if poison_of(error):  # errors of a GPU may be raised when results are fetched
                raise
            logger.warning("The result of request %d cannot be sent.", place, exc_info=True)
            why = describe_unsendable(result)
            return _error(503, f"Unsupported model output data type. {why}".rstrip())
        if len(body) > max_bytes:
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
            return _error(503, "The handler set a reason phrase or a header that is not text.")
        size = len(reason) + sum(len(key) + len(value) for key, value in headers.items())
        if size > _MAX_HEAD_CHARACTERS or len(headers) > _MAX_HEADERS:
            what = (
                f"The handler set {len(headers)} headers with {size} characters in all; at most "
                f"{_MAX_HEADERS} headers with {_MAX_HEAD_CHARACTERS} characters are accepted."
            )
            logger.warning("The answer to request %d cannot be sent. %s", place, what)
            return _error(500, what)
        return Prediction(body, status, reason, headers)


def headers_of(request: Input) -> dict[str, Any]:
    """Return the headers for the handler: an entry for each part, and those of the request."""
    headers: dict[str, Any] = {
        part.name: {"content-type": part.content_type} for part in request.parts
    }
    headers.update(request.headers)
    return headers


def tensor_error(status: int, message: str, kind: str = _FAILURE) -> Prediction:
    """Return an error that also has the member that clients of the protocol read."""
    return _error(status, message, kind, error=message)


def _error(status: int, message: str, kind: str = _FAILURE, **more: str) -> Prediction:
    body = {"code": status, "type": kind, "message": message, **more}
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
        if media_type.startswith("text"):
            return bytes(part.body).decode()
        if media_type == TENSORS_TYPE:
            return _document(part)
    except UNREADABLE:
        logger.warning("Part %r is not %s; it is passed on as bytes.", part.name, media_type)
    return part.body


def _undecoded(part: Part) -> Any:
    if part.content_type != TENSORS_TYPE:
        return part.body
    try:
        document = _document(part, as_lists=True)
    except UNREADABLE:
        return part.body
    return _as_json(document)


def _as_json(document: dict[str, Any]) -> bytearray:
    return bytearray(json.dumps(document, default=_as_base64).encode())


def _document(part: Part, *, as_lists: bool = False) -> dict[str, Any]:
    document = document_of(part.body, as_lists=as_lists)
    part.content_type = _JSON_TYPE  # for the handler
    return document


def _as_base64(element: bytes) -> str:
    return base64.b64encode(element).decode()


_MAX_PLACE = 200
_MAX_KEY = 40


def encode_result(result: Any, json_nan: str = KEEP) -> Buffer:
    """Encode a result: bytes raw, str as UTF-8, a tensor by ``torch.save``, all else as JSON.

    In JSON, numpy's scalars are numbers, its arrays lists, and tensors of one element numbers.
    Raises NotJson, TypeError, ValueError (`describe_unsendable`).
    """
    if isinstance(result, bytes | bytearray):
        return result
    if isinstance(result, str):
        return str.encode(result)  # a subclass may override the method
    if is_tensor(result):
        file = io.BytesIO()
        sys.modules["torch"].save(result, file)
        return file.getvalue()
    if json_nan == KEEP:
        return json.dumps(result, indent=2, default=_plain).encode()
    return to_json(result, json_nan, indent=2, default=_plain).encode()


def describe_unsendable(result: Any) -> str:
    """Return why a result could not be encoded; empty if unknown.

    For example ``prediction[0]["mask"] is a torch.Tensor of 3 dimensions.``
    """
    try:
        found = _unsendable(result, "prediction", ())
    except RecursionError:
        return "The prediction is nested too deeply."
    except Exception:  # noqa: BLE001 - foreign objects
        return ""
    return f"{found}." if found else ""


def _plain(value: Any) -> Any:
    """Convert a value of numpy or torch to a JSON value; raises TypeError if it has none."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        plain = value.tolist()
        if not isinstance(plain, numpy.generic):  # a longdouble stays one
            return plain
    elif is_tensor(value) and value.numel() == 1:
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _unsendable(value: Any, place: str, above: tuple[int, ...]) -> str:
    """Describe the first place in a value that is not JSON; empty if there is none."""
    if isinstance(value, str):
        return "" if above else f"{place} is text that UTF-8 cannot encode"
    if value is None or isinstance(value, int | float):
        return ""
    if id(value) in above:
        return f"{place} contains itself"
    if isinstance(value, dict | list | tuple):
        return _unsendable_member(value, place, (*above, id(value)))
    try:
        plain = _plain(value)
    except Exception:  # noqa: BLE001 - for example of a tensor without data
        return f"{place} is {_kind(value)}"
    return _unsendable(plain, place, (*above, id(value)))


def _unsendable_member(value: Any, place: str, above: tuple[int, ...]) -> str:
    for key, member in value.items() if isinstance(value, dict) else enumerate(value):
        if key is not None and not isinstance(key, str | int | float):
            return f"{place} has a key that is {_kind(key)}"
        if found := _unsendable(member, _shortened(f"{place}[{_formatted_key(key)}]"), above):
            return found
    return ""


def _formatted_key(key: Any) -> str:
    text = json.dumps(key)
    return text if len(text) <= _MAX_KEY else f'{text[:_MAX_KEY]}…"'


def _shortened(place: str) -> str:
    if len(place) <= _MAX_PLACE:
        return place
    half = _MAX_PLACE // 2
    return f"{place[:half]}…{place[-half:]}"


def _kind(value: Any) -> str:
    kind = type(value)
    if is_tensor(value):
        count = value.dim()
        return f"a torch.Tensor of {count} dimension{'' if count == 1 else 's'}"
    if kind.__module__ == "builtins":
        return f"of type {kind.__qualname__}"
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
