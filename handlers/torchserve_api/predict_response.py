"""Answers to a batch as TorchServe's worker sent them: ``ts.protocol.otf_message_handler``.

Our workers speak another protocol. But code in the wild makes such messages, to send the pieces of
an answer (``context.cl_socket.sendall``) or to read what a service answered that it runs without a
server. All integers are signed, of 32 bits, the highest byte first:

    code, text message
    of each request: text id, text content type, code, text reason, headers, text body
    -1

A text is its length in bytes and its bytes; headers are their number and then name and value.
"""

import logging
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from marserve.backend.conversion import encode_result
from marserve.backend.protocol import STREAM_NEXT

logger = logging.getLogger(__name__)


class PredictResponse(bytearray):
    """The message."""

    arguments: tuple[Any, Mapping[int, str], str, int]
    """What `Context.send_intermediate` takes: results, ids, message, code."""


def send_intermediate_predict_response(
    ret: Sequence[Any],
    req_id_map: Mapping[int, str] | None,
    message: str,
    code: int,
    context: Any = None,
) -> None:
    """Send what is there so far of a batch's answers; the function in utils took its place.

    Raises:
        RuntimeError: The context belongs to no batch.
        ValueError: The results do not fit the requests, or there is no context.
    """
    warnings.warn(
        "Import send_intermediate_predict_response from ts.handler_utils.utils",
        PendingDeprecationWarning,
        stacklevel=2,
    )
    if context is None:
        raise ValueError("send_intermediate_predict_response needs the context of the batch")
    if is_first_rank():
        context.send_intermediate(ret, req_id_map, message, code)


def is_first_rank() -> bool:
    """Whether this process answers for all over which the model is spread."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def create_predict_response(
    ret: Sequence[Any] | None,
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Any = None,
    ts_stream_next: bool = False,
) -> PredictResponse | None:
    """Make the message; None on other ranks than 0.

    ``ret`` has one result per request, or is None for a failure. ``message`` and ``code`` are the
    batch's; the context has status and headers of each answer. ``ts_stream_next``: more is to come.
    """
    if not is_first_rank():
        return None
    response = PredictResponse(_integer(code) + _text(message.encode()))
    response.arguments = ret, req_id_map, message, code
    try:
        for place, id_ in req_id_map.items():
            if context is not None and ret is not None:
                _mark_stream(context, place, ret[place], more=ts_stream_next)
            response += _text(id_.encode())
            response += _head(context, place, code)
            response += _text(b"error" if ret is None else encode_result(ret[place]))
    except TypeError:
        logger.warning("A result cannot be sent.", exc_info=True)
        return create_predict_response(None, req_id_map, "Unsupported model output data type.", 503)
    response += _integer(-1)
    return response


def _mark_stream(context: Any, place: int, result: Any, *, more: bool) -> None:
    """Say in the headers whether more is to come."""
    criteria = context.stopping_criteria
    if more:
        context.set_response_header(place, STREAM_NEXT, "true")
    elif criteria:
        stops = criteria[place](result)
        if stops is not None:
            context.set_response_header(place, STREAM_NEXT, "false" if stops else "true")
    elif context.get_response_headers(place).get(STREAM_NEXT) == "true":
        context.set_response_header(place, STREAM_NEXT, "false")


def _head(context: Any, place: int, code: int) -> bytes:
    """Content type, status, reason and headers of one answer."""
    if context is None:
        return _text(b"") + _integer(code) + _text(b"") + _integer(0)
    status, reason = context.get_response_status(place)
    headers = context.get_response_headers(place)
    content_type = context.get_response_content_type(place) or ""
    head = _text(content_type.encode()) + _integer(status or 200) + _text((reason or "").encode())
    head += _integer(len(headers))
    for name, value in headers.items():
        head += _text(name.encode()) + _text(value.encode())
    return head


def _integer(value: int) -> bytes:
    return struct.pack("!i", value)


def _text(value: Any) -> bytes:
    return _integer(len(value)) + bytes(value)
