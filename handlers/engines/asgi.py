"""Calls of an ASGI application in this process, for engines whose stable interface is HTTP."""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Application = Callable[[Message, Any, Any], Awaitable[None]]

_EVENT_END = b"\n\n"


class Answer:
    """Collects an application's response.

    ``on_start`` gets the status and the content type (lower case, or empty), ``on_event`` each
    event of a ``text/event-stream`` except the last. ``body`` is the whole body, or the last event.
    """

    def __init__(
        self, on_start: Callable[[int, str], None], on_event: Callable[[bytes], None]
    ) -> None:
        self.content_type = ""
        self.body = b""
        self._on_start = on_start
        self._on_event = on_event

    def take(self, message: Message) -> None:
        """Process one message of the application."""
        if message["type"] == "http.response.start":
            headers: dict[bytes, bytes] = dict(message.get("headers", ()))
            self.content_type = headers.get(b"content-type", b"").decode().lower()
            self._on_start(message["status"], self.content_type)
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if self.content_type.startswith("text/event-stream"):
                self._pass_events_on()

    def _pass_events_on(self) -> None:
        """Pass on all events except the last, which ends the answer or is incomplete."""
        *events, last, unfinished = [b"", *self.body.split(_EVENT_END)]
        for event in filter(None, events):
            self._on_event(event + _EVENT_END)
        self.body = last + _EVENT_END + unfinished if last else unfinished


async def ask(
    application: Application, method: str, path: str, body: bytes, answer: Answer
) -> None:
    """Send a request with a JSON body and wait for the complete answer."""
    finished = asyncio.Event()
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await finished.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        answer.take(message)

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
        await application(scope, receive, send)
    finally:
        finished.set()
