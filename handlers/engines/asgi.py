"""Calls of an ASGI application in this process, for engines whose stable interface is HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from marserve.backend.context import Context
from marserve.handlers.engines.llm_handler import send_piece

Message = MutableMapping[str, Any]
Application = Callable[[Message, Any, Any], Awaitable[None]]

_EVENT_END = b"\n\n"


class Answer:
    """An application's response to the only request of a context, which gets status and type.

    The events of a ``text/event-stream`` are sent as pieces, except the last. ``body`` is the whole
    body, or the last event.
    """

    def __init__(self, context: Context) -> None:
        self.content_type = ""  # lower case
        self.body = b""
        self._context = context

    async def take(self, message: Message) -> None:
        """Process one message of the application."""
        if message["type"] == "http.response.start":
            headers: dict[bytes, bytes] = dict(message.get("headers", ()))
            self.content_type = headers.get(b"content-type", b"").decode().lower()
            self._context.set_response_status(message["status"], "", 0)
            self._context.set_response_content_type(0, self.content_type)
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if self.content_type.startswith("text/event-stream"):
                self._send_events()

    def _send_events(self) -> None:
        """Send all events except the last, which ends the answer or is incomplete."""
        *events, last, unfinished = [b"", *self.body.split(_EVENT_END)]
        for event in filter(None, events):
            send_piece((event + _EVENT_END).decode(), self._context)
        self.body = last + _EVENT_END + unfinished if last else unfinished


async def ask(
    application: Application, method: str, path: str, body: bytes, context: Context
) -> Answer:
    """Send a request with a JSON body and return the complete answer."""
    answer, finished = Answer(context), asyncio.Event()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await finished.wait()
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": ("localhost", 80),
        "state": {},
    }
    try:
        await application(scope, receive, answer.take)
    finally:
        finished.set()
    return answer
