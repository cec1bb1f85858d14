"""``ts.protocol.otf_message_handler``: a batch's answers in the format of TorchServe's worker.

Our workers have another protocol. Handlers create such messages to send pieces of an answer
(``context.cl_socket.sendall``), other programs read them from `Service.predict`. Integers are
signed, 32 bits, big-endian; a text is its length in bytes and its bytes; headers are their number,
then name and value of each:

    code, text message
    of each request: text id, text content type, code, text reason, headers, text body
    -1
"""

import logging
import os
import struct
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from marserve.backend.context import Context
from marserve.backend.conversion import encode_result
from marserve.backend.protocol import STREAM_NEXT

logger = logging.getLogger(__name__)


class PredictResponse(bytearray):
    """The message, and the arguments of `Context.send_intermediate` that it was made of."""

    arguments: tuple[Any, Mapping[int, str], str, int]


def send_intermediate_predict_response(
    ret: Sequence[Any],
    req_id_map: Mapping[int, str] | None,
    message: str,
    code: int,
    context: Any = None,
) -> None:
    """Send pieces of a batch's answers, as `handlers.utils.send_intermediate_predict_response`."""
    warnings.warn(
        "Import send_intermediate_predict_response from ts.handler_utils.utils",
        PendingDeprecationWarning,
        stacklevel=2,
    )
    if context is None:
        raise ValueError("send_intermediate_predict_response needs the context of the batch")
    send_pieces(ret, req_id_map, message, code, context)


def send_pieces(
    ret: Sequence[Any],
    req_id_map: Mapping[int, str] | None,
    message: str,
    code: int,
    context: Any,
) -> None:
    """Send pieces from rank 0: to the clients of the batch, else to the context's socket."""
    if not is_first_rank():
        return
    if isinstance(context, Context) and (context.on_intermediate or context.cl_socket is None):
        context.send_intermediate(ret, req_id_map, message, code)
    else:
        response = create_predict_response(
            ret, req_id_map or {}, message, code, context, ts_stream_next=True
        )
        context.cl_socket.sendall(response)


def is_first_rank() -> bool:
    """Return whether this process answers for all ranks of a distributed model."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def create_predict_response(
    ret: Sequence[Any] | None,
    req_id_map: Mapping[int, str],
    message: str,
    code: int,
    context: Any = None,
    ts_stream_next: bool = False,
) -> PredictResponse | None:
    """Return the message; None on ranks other than 0.

    ``ret`` has one result per request, or is None for a failure. The context has status and headers
    of each answer. With ``ts_stream_next`` more pieces follow.
    """
    if not is_first_rank():
        return None
    response = PredictResponse(_integer(code) + _text(message))
    response.arguments = ret, req_id_map, message, code
    try:
        for index, id_ in req_id_map.items():
            if context is not None and ret is not None:
                _mark_stream(context, index, ret[index], more=ts_stream_next)
            response += _text(id_) + _head(context, index, code)
            response += _text("error" if ret is None else encode_result(ret[index]))
    except TypeError:
        logger.warning("A result cannot be sent.", exc_info=True)
        return create_predict_response(None, req_id_map, "Unsupported model output data type.", 503)
    response += _integer(-1)
    return response


def _mark_stream(context: Any, index: int, result: Any, *, more: bool) -> None:
    criteria = context.stopping_criteria
    if more:
        context.set_response_header(index, STREAM_NEXT, "true")
    elif criteria:
        stops = criteria[index](result)
        if stops is not None:
            context.set_response_header(index, STREAM_NEXT, "false" if stops else "true")
    elif context.get_response_headers(index).get(STREAM_NEXT) == "true":
        context.set_response_header(index, STREAM_NEXT, "false")


def _head(context: Any, index: int, code: int) -> bytes:
    if context is None:
        return _text("") + _integer(code) + _text("") + _integer(0)
    status, reason = context.get_response_status(index)
    headers = context.get_response_headers(index)
    head = _text(context.get_response_content_type(index) or "") + _integer(status or 200)
    head += _text(reason or "") + _integer(len(headers))
    return head + b"".join(_text(name) + _text(value) for name, value in headers.items())


def _integer(value: int) -> bytes:
    return struct.pack("!i", value)


def _text(value: Any) -> bytes:
    encoded = value.encode() if isinstance(value, str) else value
    return _integer(len(encoded)) + bytes(encoded)
