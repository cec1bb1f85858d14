import asyncio

import pytest

from marserve.handlers.engines.asgi import Answer, ask


class Listener:
    """A context that stores what it receives, in order."""

    def __init__(self) -> None:
        self.request_ids = {0: "a"}
        self.heard: list[object] = []
        self.answer: Answer | None = None

    def set_response_status(self, status, phrase, idx) -> None:
        self.heard.append(status)

    def set_response_content_type(self, idx, value) -> None:
        self.heard.append(value)

    def send_intermediate(self, results, request_ids, message, code) -> None:
        assert (request_ids, code) == (self.request_ids, 200)
        self.heard += results


def application(*chunks: bytes, content_type: bytes = b"text/event-stream; charset=utf-8"):
    async def app(scope, receive, send) -> None:
        request = await receive()
        assert request == {"type": "http.request", "body": b"{}", "more_body": False}
        assert (scope["method"], scope["path"]) == ("POST", "/v1/chat")
        assert dict(scope["headers"])[b"content-length"] == b"2"
        headers = [(b"content-type", content_type)] if content_type else []
        await send({"type": "http.response.start", "status": 201, "headers": headers})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body"})

    return app


def asked(app) -> Listener:
    listener = Listener()
    listener.answer = asyncio.run(ask(app, "POST", "/v1/chat", b"{}", listener))
    return listener


def test_a_body() -> None:
    listener = asked(application(b'{"a":', b"\n\n1}", content_type=b"application/json"))
    assert listener.heard == [201, "application/json"]
    assert listener.answer.body == b'{"a":\n\n1}'


def test_an_answer_without_a_content_type() -> None:
    assert asked(application(b"x", content_type=b"")).heard == [201, ""]


@pytest.mark.parametrize(
    "chunks",
    [
        (b"data: 1\n\n", b"data: 2\n\n", b"data: [DONE]\n\n"),
        (b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n",),
        tuple(bytes([item]) for item in b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"),
    ],
    ids=["one by one", "at once", "byte by byte"],
)
def test_events_are_passed_on_whole_and_the_last_is_kept(chunks) -> None:
    listener = asked(application(*chunks))
    assert listener.heard[2:] == ["data: 1\n\n", "data: 2\n\n"]
    assert listener.answer.body == b"data: [DONE]\n\n"


def test_an_incomplete_stream_ends_with_its_last_part() -> None:
    listener = asked(application(b"data: 1\n\ndata: 2\n\nda"))
    assert listener.heard[2:] == ["data: 1\n\n"]
    assert listener.answer.body == b"data: 2\n\nda"


def test_the_client_disconnects_after_the_answer() -> None:
    async def watched(scope, receive, send) -> None:
        await receive()
        leaving = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        assert not leaving.done()
        await send({"type": "http.response.start", "status": 200})
        listeners.append(leaving)

    listeners: list[asyncio.Future] = []

    async def run() -> None:
        await ask(watched, "GET", "/", b"", Listener())
        assert await listeners[0] == {"type": "http.disconnect"}

    asyncio.run(run())


def test_a_failing_application_fails_the_caller() -> None:
    async def failing(scope, receive, send) -> None:
        raise RuntimeError("engine dead")

    with pytest.raises(RuntimeError, match="engine dead"):
        asked(failing)
