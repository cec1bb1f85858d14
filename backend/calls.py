"""The calls of handlers to other models (`Context.infer`), in the worker.

A call is made on behalf of a request: when that is answered, the frontend cancels its calls. When a
handler stops waiting for a call (a timeout, a failed sibling in a task group), a `CancelCall` is
sent.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from marserve.backend.conversion import encode_result
from marserve.backend.framing import encode
from marserve.backend.model_answers import ModelAnswer, ModelCallFailed
from marserve.backend.protocol import Buffer, Call, CallReply, CancelCall, Part
from marserve.backend.tensors.arrays import is_tensor

# Of names and headers; far below the frontend's limit.
_MAX_META_BYTES = 1 << 20
_FAILED = 400
_MAX_QUOTED = 200


def unchanging(frame: list[Buffer]) -> list[bytes]:
    """Copy what a handler may change while the frame is written: all that is not `bytes`."""
    return [bytes(buffer) for buffer in frame]


class HandlerCalls:
    """The calls that the handlers of all requests make; ``write`` sends a frame."""

    def __init__(self, max_call_bytes: int, write: Callable[[list[bytes]], None]) -> None:
        self._max_bytes = max_call_bytes
        self._write = write
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._last = 0
        self._replies: dict[int, asyncio.Future[CallReply]] = {}

    def replied(self, reply: CallReply) -> None:
        """Pass a reply to the handler, if it still waits for it."""
        waiting = self._replies.get(reply.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(reply)

    async def make(self, call: Call, on_behalf: "set[asyncio.Future[CallReply]]") -> CallReply:
        """Send a call and wait for its reply, whose future is in ``on_behalf`` until then.

        The deadline is the frontend's, which answers each call or closes the connection.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "context.infer() is awaited in the event loop that runs the handler; from another "
                "thread, asyncio.run_coroutine_threadsafe(context.infer(...), loop) takes it there"
            )
        size = sum(len(part.body) for part in call.parts)
        if size > self._max_bytes:
            raise ModelCallFailed(
                call.model,
                413,
                f"The request body is longer than max_request_size ({self._max_bytes} bytes).",
                "PayloadTooLargeException",
            )
        self._last = call.number = self._last + 1
        buffers = encode(call)
        if sum(map(len, buffers)) - size > _MAX_META_BYTES:
            raise ValueError("The headers and names of parts of a call are longer than 1 MiB")
        reply: asyncio.Future[CallReply] = self._loop.create_future()
        self._replies[call.number] = reply
        on_behalf.add(reply)
        self._write(unchanging(buffers))
        try:
            return await reply
        except asyncio.CancelledError:
            self._write(unchanging(encode(CancelCall(call.number))))
            raise
        finally:
            del self._replies[call.number]
            on_behalf.discard(reply)


class RequestCalls:
    """The calls on behalf of the request with the number ``batch``; a `Caller`."""

    def __init__(
        self, calls: HandlerCalls, batch: int, drain: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        self.drain = drain
        self._calls = calls
        self._batch = batch
        self._waiting: set[asyncio.Future[CallReply]] = set()
        self.is_open = True

    async def infer(
        self,
        model: str,
        data: Any,
        *,
        version: str | None,
        parts: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        timeout: float | None,
    ) -> ModelAnswer:
        """Call a model (`Context.infer`)."""
        if not self.is_open:
            raise RuntimeError(_ANSWERED)
        fields = headers_and_parts(data, parts, headers or {})
        if timeout is not None and not timeout > 0:
            raise ValueError(f"The timeout of a call is more than 0 seconds, not {timeout!r}")
        call = Call(0, self._batch, str(model), str(version or ""), timeout, *fields)
        reply = await self._calls.make(call, self._waiting)
        return _answer_of(model, reply)

    def close(self) -> None:
        """End the calls: the request is answered."""
        self.is_open = False
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(RuntimeError(_ANSWERED))


_ANSWERED = (
    "The request on whose behalf context.infer() was called has been answered: await what a "
    "handler starts before it returns"
)


def headers_and_parts(
    data: Any, parts: Mapping[str, Any] | None, headers: Mapping[str, str]
) -> tuple[dict[str, str], list[Part]]:
    """Return headers and parts as of an HTTP request; TypeError, ValueError for unusable values."""
    headers = {str(name): str(value) for name, value in headers.items()}
    if parts is not None:
        if data is not None:
            raise TypeError("A call has either data or parts")
        return headers, [Part(str(name), *_encoded(value)) for name, value in parts.items()]
    content_type, body = ("", b"") if data is None else _encoded(data)
    for name, value in headers.items():
        if name.lower() == "content-type":
            content_type = value.partition(";")[0].strip().lower()
            break
    else:
        if content_type:
            headers["content-type"] = content_type
    return headers, [Part("body", content_type, body)]


def _encoded(value: Any) -> tuple[str, Buffer]:
    """Return the media type and the bytes of a value, encoded as a handler's result."""
    if isinstance(value, memoryview):
        return "", value.tobytes()
    body = encode_result(value)
    if isinstance(value, str):
        return "text/plain", body
    is_binary = isinstance(value, bytes | bytearray) or is_tensor(value)
    return "" if is_binary else "application/json", body


def _answer_of(model: str, reply: CallReply) -> ModelAnswer:
    prediction = reply.prediction
    if prediction is None:
        raise ModelCallFailed(model, reply.status, reply.message, reply.type, reply.retry_after)
    answer = ModelAnswer(bytes(prediction.body), prediction.status, prediction.headers)
    if prediction.status >= _FAILED:
        raise ModelCallFailed(
            model, prediction.status, _error_text(answer) or prediction.reason, answer=answer
        )
    return answer


def _error_text(answer: ModelAnswer) -> str:
    """Return the message of an error body, or its text, on one line; empty if it is not UTF-8."""
    text = ""
    with contextlib.suppress(ValueError, RecursionError):
        text = answer.text
        document = answer.json()
        if isinstance(document, dict) and isinstance(document.get("message"), str):
            text = document["message"]
    return " ".join(text[:_MAX_QUOTED].split())
