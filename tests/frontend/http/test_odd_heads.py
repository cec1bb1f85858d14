"""Requests that TorchServe takes and aiohttp refuses: some are repaired, the others say why."""

import json
import logging
from collections.abc import Iterable
from typing import Any

import fakes
import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.http.odd_heads import repaired
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import ANY_OTHER, Route

START = "Invalid HTTP message: "
HEALTH = b"GET /health HTTP/1.1\r\n\r\n"
FORM = b'--B\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--B--\r\n'


async def health(_request: HttpRequest) -> HttpResponse:
    return json_response({"status": "Healthy"})


async def echo(request: HttpRequest) -> HttpResponse:
    input_ = await read_input(request, 1 << 20, {})
    parts = [[part.name, bytes(part.body).decode()] for part in input_.parts]
    return json_response({"parts": parts, "headers": input_.headers})


ROUTES = {"health": Route(health, when_full=True), "echo": Route(echo), ANY_OTHER: Route(echo)}


@pytest.fixture
def talk(listen, caplog):
    """Send pieces on one connection; return status and document of each answer."""
    caplog.set_level(logging.INFO, logger="ACCESS_LOG")

    def send(*pieces):
        answers = []

        async def test(listener):
            reader, writer = await listener.connect()
            for piece in pieces:
                writer.write(piece)
                await fakes.drain_loop()
            writer.write_eof()
            received = await reader.read()
            while received:
                head, _, received = received.partition(b"\r\n\r\n")
                fields = dict(line.split(b": ", 1) for line in head.split(b"\r\n")[1:])
                length = 0 if head_only(pieces[0]) else int(fields[b"content-length"])
                body, received = received[:length], received[length:]
                answers.append((int(head.split()[1]), json.loads(body) if body else None))

        listen(test, ROUTES)
        return answers

    return send


def head_only(piece: bytes) -> bool:
    return piece.startswith(b"HEAD")


def post(*headers: bytes, body: bytes = b"1") -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Host: h", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, b"", b""]) + body


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    return [line[line.index('"') : line.rindex(" ")] for line in lines]


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS"])
@pytest.mark.parametrize("target", [b"/health", b"/health?verbose=1", b"/health/"])
@pytest.mark.parametrize("headers", [b"", b"Content-Length: 0\r\n", b"Connection: keep-alive\r\n"])
def test_a_probe_needs_no_host(talk, method, target, headers):
    probe = b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, headers)
    assert [status for status, _ in talk(probe, probe)] == [200, 200]


@pytest.mark.parametrize(
    "before",
    [b"", HEALTH, post(), post(b"Content-Type: multipart/form-data; boundary=B", body=FORM)],
)
def test_a_probe_without_host_that_comes_byte_by_byte_behind_others(talk, before):
    pieces = [HEALTH[at : at + 1] for at in range(len(HEALTH))]
    answers = talk(*([before] if before else []), b"\r\n", *pieces)
    assert answers[-1] == (200, {"status": "Healthy"})


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        (b"GET /echo HTTP/1.1\r\n\r\n", "GET /echo"),
        (b"GET /elsewhere?a=1 HTTP/1.1\r\n\r\n", "GET /elsewhere?a=1"),
        (b"POST /health HTTP/1.1\r\nContent-Length: 0\r\n\r\n", "POST /health"),
        (b"GET /health HTTP/1.1\r\nContent-Length: 1\r\n\r\na", "GET /health"),
        (b"GET /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "GET /health"),
        (b"GET /health HTTP/1.1\r\nExpect: 100-continue\r\n\r\n", "GET /health"),
    ],
)
def test_other_requests_without_host_are_refused(talk, caplog, request_, line):
    [(status, document)] = talk(request_)
    assert (status, document["message"]) == (400, f"{START}the request has no Host header.")
    assert logged(caplog) == [f'"{line} HTTP/1.1" 400']


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("name", [b"Content-Type", b"content-TYPE"])
def test_an_equal_content_type_may_be_repeated(talk, times, name):
    request = post(*[name + b": application/json"] * times, b"X-A: 1")
    for status, document in talk(request, request):
        assert (status, document["parts"]) == (200, [["body", "1"]])
        headers = {
            "Host": "h",
            name.decode(): "application/json",
            "X-A": "1",
            "Content-Length": "1",
        }
        assert document["headers"] == headers


def test_the_equal_content_types_of_a_form_and_of_chunks(talk):
    twice = [b"Content-Type: multipart/form-data; boundary=B"] * 2
    chunked = post(*twice, b"Transfer-Encoding: chunked", body=FORM)
    chunked = chunked.replace(b"Content-Length: %d\r\n" % len(FORM), b"")
    chunked = chunked.replace(FORM, b"%x\r\n%b\r\n0\r\n\r\n" % (len(FORM), FORM))
    for status, document in talk(post(*twice, body=FORM), chunked):
        assert (status, document["parts"]) == (200, [["a", "1"]])


def test_of_a_harmless_header_the_last_counts(talk):
    [(status, document)] = talk(post(b"User-Agent: a", b"Max-Forwards: 1", b"user-agent: b"))
    assert status == 200
    headers = {"Host": "h", "Max-Forwards": "1", "user-agent": "b", "Content-Length": "1"}
    assert document["headers"] == headers


def test_a_body_is_never_repaired(talk):
    twice = b"Content-Type: a/b\r\n" * 2
    body = HEALTH + b"GET /health HTTP/1.1\r\nHost: h\r\n" + twice + b"\r\n"
    head = post(b"X-A: 1", body=body)[: -len(body)]
    pieces = [head, *(body[at : at + 30] for at in range(0, len(body), 30))]
    chunks = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
    for sent in (pieces, [chunks, b"%x\r\n" % len(body), body, b"\r\n0\r\n\r\n"]):
        [(status, document)] = talk(*sent)
        assert (status, document["parts"]) == (200, [["body", body.decode()]])


def test_nothing_is_repaired_behind_an_upgrade_or_an_unanswered_request(talk):
    upgrade = post(b"Connection: Upgrade", b"Upgrade: h2c", body=b"")
    assert [status for status, _ in talk(upgrade, HEALTH)] == [200, 400]
    assert [status for status, _ in talk(post() + HEALTH)][-1] == 400


@pytest.mark.parametrize(
    ("request_", "reason", "line"),
    [
        (post(b"Host: h"), "the header Host is sent more than once", "POST /echo"),
        (
            post(b"Content-Type: a/b", b"Content-Type: a/c"),
            "the header Content-Type is sent more than once",
            "POST /echo",
        ),
        (
            post(b"Content-Length: 1"),
            "the header Content-Length is sent more than once",
            "POST /echo",
        ),
        (
            post(b"Transfer-Encoding: chunked"),
            "both Content-Length and Transfer-Encoding are sent",
            "POST /echo",
        ),
        (post(b"X-A: 1\r\n 2"), "a header is folded over several lines", "POST /echo"),
        (
            b"GET /health HTTP/1.1\nHost: h\n\n",
            "the request line does not end with CRLF",
            "GET /health",
        ),
        (b"get /health HTTP/1.1\r\nHost: h\r\n\r\n", "the method is unknown", "get /health"),
        (b"FETCH /health HTTP/1.1\r\nHost: h\r\n\r\n", "the method is unknown", "GET /bad-request"),
        (b"GET /health HTTP/1.2\r\nHost: h\r\n\r\n", "only HTTP/1.1 and HTTP/1.0", "GET /health"),
        (b"GET /health\r\n\r\n", "only HTTP/1.1 and HTTP/1.0 are supported", "GET /health"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 is not supported", "PRI *"),
        (
            b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n" + HEALTH,
            "the PROXY protocol is not supported",
            "GET /bad-request",
        ),
        (b"\x16\x03\x01\x02\x00\x01", "it is the start of TLS", "GET /bad-request"),
        (
            post(*(b"X-%d: 1" % number for number in range(130))),
            "the request has more than 128 headers",
            "POST /echo",
        ),
        (
            post(b"X-A: " + b"a" * 9000),
            "the first line or a header is longer than 8190 bytes",
            "POST /echo",
        ),
        (
            b"POST /echo HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\nbody",
            "bytes follow the end of a request with Connection: close",
            "POST /echo",
        ),
        (
            b"PUT /echo HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1 \r\na\r\n",
            "the size of a chunk is not a hexadecimal number",
            "PUT /echo",
        ),
    ],
)
def test_a_refusal_has_its_reason_and_the_log_its_path(talk, caplog, request_, reason, line):
    [(status, document)] = talk(request_)
    assert status == 400
    assert document["message"].startswith(START + reason)
    assert logged(caplog) == [f'"{line} HTTP/1.1" 400']


def test_the_reason_of_a_long_head_that_comes_in_pieces(talk):
    head = b"GET /health HTTP/1.1\r\n" + b"".join(
        b"X-%d: %b\r\n" % (n, b"a" * 500) for n in range(50)
    )
    head += b"Content-Length: 5\r\n\r\n"
    [(status, document)] = talk(*(head[at : at + 1000] for at in range(0, len(head), 1000)))
    assert (status, document["message"]) == (400, f"{START}the request has no Host header.")


class Seen:
    """What the parser finds in bytes."""

    def __init__(self, data: bytes) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.body = self.target = b""
        self.is_complete = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.is_complete = True

    def framing(self) -> Iterable[Any]:
        decides = (b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect")
        yield from (each for each in self.headers if each[0] in decides)
        yield from (self.target, self.body, self.is_complete, self.parser.get_method())


LINES = [
    b"Host: h",
    b"Content-Type: a/b",
    b"content-type:a/b ",
    b"Content-Type: c/d",
    b"User-Agent: x",
    b"User-Agent:",
    b"ETag: Content-Length: 9",
    b"Content-Length: 3",
    b"Content-Length: 0",
    b"Transfer-Encoding: chunked",
    b"Connection: close",
    b"X-A: Host:",
    b" folded",
    b"Content-Type : a/b",
    b"Server: a\nContent-Length: 1",
]


@given(
    st.sampled_from([b"GET", b"POST", b"OPTIONS"]),
    st.lists(st.sampled_from(LINES), max_size=6),
    st.sampled_from([b"", b"abc", b"3\r\nabc\r\n0\r\n\r\n", HEALTH]),
)
def test_a_repair_leaves_where_a_request_ends(method, lines, body):
    head = b"\r\n".join([method + b" /health HTTP/1.1", *lines, b"", b""])
    better = repaired(head, lambda _method, _target: True)
    try:
        before = Seen(head + body)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        with pytest.raises((httptools.HttpParserError, httptools.HttpParserUpgrade)):
            Seen(better + body)
        return
    assert list(Seen(better + body).framing()) == list(before.framing())
