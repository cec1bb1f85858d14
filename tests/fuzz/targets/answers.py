"""Answers of handlers as clients read them: any status, phrase, headers, and pieces of a stream."""

import asyncio
from typing import Any

import httptools
from fuzz.choices import Choices
from fuzz.http_door import exchange
from fuzz.limits import Limits

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, prediction_response
from marserve.frontend.http.router import Route

LIMITS = Limits(calls=60_000, calls_per_byte=300)
_REQUEST = b"%b /a HTTP/1.%d\r\nHost: h\r\nConnection: close\r\n\r\n"
_WITHOUT_BODY = (204, 304)
_SERVERS = ("connection", "content-length", "transfer-encoding", "x-request-id", "pragma",
            "cache-control", "expires")  # fmt: skip


def target(data: bytes) -> None:
    """A client reads the status, the headers and the body that the handler gave, or an error."""
    choices = Choices(data)
    method = choices.one_of((b"GET", b"POST", b"HEAD"))
    minor = choices.number(2)
    status = choices.one_of((200, 201, 204, 304, 404, 599, 999, 0, 100, 101, 199, 1000, -1))
    phrase = choices.text() if choices.flag() else None
    headers = dict(choices.several(lambda: (_name(choices), choices.text())))
    pieces = [choices.some_bytes(80) for _ in range(choices.number(4))]
    prediction = Prediction(choices.some_bytes(200), status, phrase or "", headers)

    async def serve(_request: HttpRequest) -> HttpResponse:
        if not pieces:
            return prediction_response(prediction)
        stream = Stream(prediction)
        asyncio.get_running_loop().call_soon(_push, stream, pieces)
        return prediction_response(stream)

    answers = exchange([_REQUEST % (method, minor)], {"a": Route(serve)})
    client = _Client()
    parser = httptools.HttpResponseParser(client)
    if method == b"HEAD" or int(answers.received.split()[1]) in _WITHOUT_BODY:
        assert answers.received.endswith(b"\r\n\r\n")
        assert answers.received.count(b"\r\n\r\n") == 1
        return
    parser.feed_data(answers.received)
    if parser.get_status_code() == status:
        assert b"".join(client.body) == b"".join([prediction.body, *pieces])
        names = {name.encode() for name in headers if name.lower() not in _SERVERS}
        assert names <= set(client.headers)
    else:
        assert parser.get_status_code() == 500


def _push(stream: Stream, pieces: list[bytes]) -> None:
    for piece in pieces:
        stream.push(piece)
    stream.end()


def _name(choices: Choices) -> Any:
    known = ("content-type", "Content-Length", "Transfer-Encoding", "Connection", "x", "Set-Cookie")
    return choices.one_of(known) if choices.flag() else choices.text()


class _Client:
    """What a client reads."""

    def __init__(self) -> None:
        self.headers: list[bytes] = []
        self.body: list[bytes] = []

    def on_header(self, name: bytes, _value: bytes) -> None:
        self.headers.append(name)

    def on_body(self, body: bytes) -> None:
        self.body.append(body)
