"""What a client gets is the same with the fast path and without it, byte for byte.

Each of these requests is sent whole, in two pieces and byte by byte (long ones in pieces of 61
bytes), to a listener with the fast path and to one without; then comes a plain one. What comes back
until the connection is closed, and when that is, is compared.
"""

import asyncio
import contextlib
import logging
import re

import fakes
import pytest
from echo_routes import MAX_BYTES, ROUTES

ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


def post(*headers: str, body: bytes = b"hello", start: str = "POST /model HTTP/1.1") -> bytes:
    """A request with a content-length, unless one is given."""
    lines = [start, "Host: h", *headers]
    if not any(line.lower().startswith("content-length") for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def raw(*lines: str, body: bytes = b"") -> bytes:
    """A request of these lines."""
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


PLAIN = post()
CHUNKED = raw("POST /model HTTP/1.1", "Host: h", "Transfer-Encoding: chunked")
LARGE = post(body=b"x" * MAX_BYTES)
FORM = post("Content-Type: application/x-www-form-urlencoded", body=b"a=1&b=2")

REQUESTS = {
    "nothing": b"",
    "plain": PLAIN,
    "PUT": post(start="PUT /model HTTP/1.1"),
    "GET": post(start="GET /model HTTP/1.1"),
    "HEAD": post(start="HEAD /model HTTP/1.1"),
    "CONNECT": post(start="CONNECT h:80 HTTP/1.1"),
    "TRACE": post(start="TRACE /model HTTP/1.1"),
    "an unknown method": post(start="FETCH /model HTTP/1.1"),
    "a method in lower case": post(start="post /model HTTP/1.1"),
    "an empty body": post(body=b""),
    "no length": raw("POST /model HTTP/1.1", "Host: h"),
    "a large body": LARGE,
    "a large body that is refused": post(body=b"refuse" + b"x" * 580_000),
    "a large body behind an expectation": post("Expect: 100-continue", body=b"x" * MAX_BYTES),
    "a body of middle size": post(body=b"\r\n\r\n" * 20_000),
    "a part of a large body": LARGE[:-1],
    "a little of a large body": LARGE[:200],
    "the head of a large body": LARGE[: LARGE.index(b"xx")],
    "large ones": LARGE * 2,
    "large, small and large": LARGE + PLAIN + LARGE,
    "large and special": LARGE + FORM,
    "large and a part": LARGE + PLAIN[:20],
    "a body too large": post(body=b"x" * (MAX_BYTES + 1)),
    "form": FORM,
    "JSON": post("Content-Type: application/json; charset=utf-8", body=b"[1]"),
    # Targets.
    "another route": post(start="POST /other HTTP/1.1"),
    "no route": post(start="POST /nowhere HTTP/1.1"),
    "query": post(start="POST /model?a=%62 HTTP/1.1"),
    "fragment": post(start="POST /model#a HTTP/1.1"),
    "escapes": post(start="POST /%6dodel/%00%ff HTTP/1.1"),
    "slashes": post(start="POST //model// HTTP/1.1"),
    "absolute": post(start="POST http://h/model HTTP/1.1"),
    "asterisk": post(start="POST * HTTP/1.1"),
    "no slash": post(start="POST model HTTP/1.1"),
    "a space in the target": post(start="POST /mo del HTTP/1.1"),
    "more than ASCII in the target": post(start="POST /model/\xe4 HTTP/1.1"),
    "a long target": post(start=f"POST /model/{'a' * 8100} HTTP/1.1"),
    "too long a target": post(start=f"POST /model/{'a' * 9000} HTTP/1.1"),
    # Versions and connections.
    "HTTP/1.0": post(start="POST /model HTTP/1.0"),
    "HTTP/1.0 that stays": post("Connection: keep-alive", start="POST /model HTTP/1.0"),
    "HTTP/0.9": b"GET /model\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/1.2": post(start="POST /model HTTP/1.2"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "keep-alive": post("Connection: Keep-Alive"),
    "close": post("Connection: close"),
    "close among others": post("Connection: keep-alive, close"),
    "another connection option": post("Connection: x"),
    "upgrade": post("Connection: Upgrade", "Upgrade: websocket"),
    "upgrade alone": post("Upgrade: h2c"),
    "expectation": post("Expect: 100-continue"),
    "another expectation": post("Expect: x"),
    "TE": post("TE: trailers"),
    "trailer": post("Trailer: x"),
    # Headers.
    "no host": raw("POST /model HTTP/1.1", "Content-Length: 1", body=b"x"),
    "two hosts": post("Host: i"),
    "an empty host": post().replace(b"Host: h", b"Host:"),
    "spaces around a value": post("X-A: \t b \t "),
    "an empty value": post("X-A:"),
    "a header twice": post("X-A: 1", "x-a: 2", "X-A: 3"),
    "a length in spaces": post("Content-Length:   5  "),
    "more than ASCII in a value": post("X-A: \xe4\xff"),
    "more than ASCII in a name": post("X-\xe4: 1"),
    "a tab in a value": post("X-A: a\tb"),
    "a control character in a value": post("X-A: a\x01b"),
    "NUL in a value": post("X-A: a\0b"),
    "DEL in a value": post("X-A: a\x7fb"),
    "a space before the colon": post("X-A : b"),
    "no name": post(": b"),
    "no colon": post("X-A"),
    "a folded header": post("X-A: a\r\n b"),
    "a folded header with a tab": post("X-A: a\r\n\tb"),
    "a line break alone": post("X-A: a\nX-B: b"),
    "a carriage return alone": post("X-A: a\rX-B: b"),
    "line breaks without returns": PLAIN.replace(b"\r\n", b"\n"),
    "empty lines in front": b"\r\n\r\n" + PLAIN,
    "many headers": post(*(f"X-{number}: {number}" for number in range(90))),
    "too many headers": post(*(f"X-{number}: {number}" for number in range(500))),
    "a long value": post(f"X-A: {'a' * 8000}"),
    "too long a value": post(f"X-A: {'a' * 9000}"),
    "too long a name": post(f"{'a' * 9000}: b"),
    # Lengths, and requests hidden in others.
    "the length twice": post("Content-Length: 5", "Content-Length: 5"),
    "two lengths": post("Content-Length: 5", "Content-Length: 6"),
    "a list of lengths": post("Content-Length: 5, 5"),
    "a signed length": post("Content-Length: +5"),
    "a negative length": post("Content-Length: -5"),
    "a length in hex": post("Content-Length: 0x5"),
    "no number": post("Content-Length: five"),
    "an empty length": post("Content-Length:"),
    "an endless length": post("Content-Length: 99999999999999999999"),
    "a length with zeros": post("Content-Length: 005"),
    "a length with thousands of zeros": post(f"Content-Length: {'0' * 4400}5"),
    "a get with thousands of zeros": post(f"Content-Length: {'0' * 4400}5", start="GET / HTTP/1.1"),
    "chunks": CHUNKED + b"5\r\nhello\r\n0\r\n\r\n",
    "chunks and a length": post("Transfer-Encoding: chunked", body=b"0\r\n\r\n" + PLAIN),
    "chunks that are none": CHUNKED + b"x\r\n",
    "identity": post("Transfer-Encoding: identity"),
    "chunked with a tab": post("Transfer-Encoding:\tchunked", body=b"0\r\n\r\n"),
    "another encoding": post("Transfer-Encoding: gzip"),
    "a body that is a request": post(body=PLAIN),
    "more than the length": post("Content-Length: 2", body=b"hello"),
    "less than the length": post("Content-Length: 500"),
    # Several.
    "two": PLAIN * 2,
    "fifty": PLAIN * 50,
    "plain and special": PLAIN + FORM + PLAIN,
    "special and plain": FORM + PLAIN + CHUNKED + b"0\r\n\r\n" + PLAIN,
    "plain and the last": PLAIN + post("Connection: close") + PLAIN,
    "plain and an empty line": PLAIN + b"\r\n",
    # Parts.
    "half a head": PLAIN[:20],
    "plain and half a head": PLAIN + PLAIN[:20],
    "special and half a head": FORM + PLAIN[:20],
    "half a body": PLAIN[:-2],
    "plain and half a body": PLAIN + PLAIN[:-2],
}


def _pieces(sent: bytes, how: str) -> list[bytes]:
    if how == "whole":
        return [sent]
    if how == "halves":
        return [sent[: len(sent) // 2], sent[len(sent) // 2 :]]
    # Each piece is a pass of the event loop.
    step = 1 if len(sent) < 1000 else 61 if len(sent) < 50_000 else 6007
    return [sent[at : at + step] for at in range(0, len(sent), step)]


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("how", ["whole", "halves", "bytes"])
@pytest.mark.parametrize("name", REQUESTS)
def test_the_answers_are_the_same(listen, caplog, name, how, leaves):
    caplog.set_level(logging.INFO, logger="ACCESS_LOG")
    results = []

    async def test(listener):
        loop = asyncio.get_running_loop()
        began = loop.time()
        reader, writer = await listener.connect()
        received = bytearray()

        async def receive():
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(65536):
                    received.extend(data)

        receiving = asyncio.ensure_future(receive())
        for piece in [*_pieces(REQUESTS[name], how), PLAIN]:
            writer.write(piece)
            await fakes.drain_loop()
        if leaves and not writer.transport.is_closing():
            with contextlib.suppress(OSError):
                writer.write_eof()
        await receiving
        results.append([ID.sub(b"ID", received), pytest.approx(loop.time() - began, abs=2)])

    for fast_path in (True, False):
        caplog.clear()
        listen(test, ROUTES, fast_path=fast_path)
        results[-1].append(
            [
                line[line.index('"') : line.rindex(" ")]
                for record in caplog.records
                if record.name == "ACCESS_LOG"
                for line in record.getMessage().split("\n")
            ]
        )
    fast, ordinary = results
    assert fast[0] == ordinary[0]
    assert fast[2] == ordinary[2]
    assert fast[1] == ordinary[1]
