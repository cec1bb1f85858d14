"""Bodies with a Content-Encoding, on routes that decode them."""

import gzip
import random
import zlib

import fakes
import pytest

from marserve.backend.protocol import Input
from marserve.frontend.errors import PayloadTooLarge
from marserve.frontend.http.content_encoding import decoded
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse
from marserve.frontend.http.router import Route

LIMIT = 1 << 20
TEXT = b'{"inputs": [1, 2, 3]}' * 50
NOISE = random.Random(7).randbytes(300_000)


def deflated(data: bytes, *, window: int = zlib.MAX_WBITS, level: int = 6) -> bytes:
    deflate = zlib.compressobj(level, wbits=window)
    return deflate.compress(data) + deflate.flush()


def raw(data: bytes) -> bytes:
    return deflated(data, window=-zlib.MAX_WBITS)


class Reading:
    def __init__(self) -> None:
        self.inputs: list[Input] = []
        self.bytes_at_the_end: list[int] = []
        self.routes = {"a": Route(self.serve)}

    async def serve(self, request: HttpRequest) -> HttpResponse:
        self.inputs.append(await read_input(request, LIMIT, {}, decodes=True))
        self.bytes_at_the_end.append(request.memory.bytes)
        return HttpResponse(200, b"read")


@pytest.fixture
def reading():
    return Reading()


@pytest.fixture
def send(reading):
    def post(body, *headers):
        return fakes.exchange(reading.routes, fakes.request("/a", "POST", body, *headers))

    return post


@pytest.mark.parametrize("data", [b"", b"x", TEXT, NOISE, bytes(LIMIT - 1000)])
@pytest.mark.parametrize(
    ("coding", "encode"),
    [
        ("gzip", gzip.compress),
        ("GZip", gzip.compress),
        ("x-gzip", gzip.compress),
        ("identity, gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw),
        ("deflate", lambda data: deflated(data, window=9)),
        ("deflate", lambda data: deflated(data, level=0)),
        ("identity", bytes),
        ("", bytes),
    ],
)
def test_the_handler_gets_the_decoded_body(coding, encode, data, reading, send):
    body = encode(data)
    assert send(body, f"Content-Encoding: {coding}", "X-A: 1").status == 200
    [input_] = reading.inputs
    assert bytes(input_.parts[0].body) == data
    headers = {name.lower(): value for name, value in input_.headers.items()}
    del headers["host"], headers["connection"]
    assert headers == {"x-a": "1", "content-length": str(len(data))}
    assert reading.bytes_at_the_end == [len(data)]


def test_a_form_and_chunks_are_decoded(reading, send):
    form = b"--b0\r\nContent-Disposition: form-data; name=a\r\n\r\n1\r\n--b0--\r\n"
    kind = "Content-Type: multipart/form-data; boundary=b0"
    assert send(gzip.compress(form), kind, "Content-Encoding: gzip").status == 200
    body = gzip.compress(TEXT)
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    headers = "Transfer-Encoding: chunked", "Content-Encoding: gzip"
    fakes.exchange(reading.routes, fakes.request("/a", "POST", chunked, *headers, framed=False))
    assert [bytes(each.parts[0].body) for each in reading.inputs] == [b"1", TEXT]
    assert reading.inputs[0].parts[0].name == "a"


def test_gzip_may_have_several_members(reading, send):
    members = [TEXT, b"", NOISE, *[b"x"] * 3000]
    body = b"".join(map(gzip.compress, members))
    assert send(body, "Content-Encoding: gzip").status == 200
    assert bytes(reading.inputs[0].parts[0].body) == b"".join(members)


@pytest.mark.parametrize(
    ("coding", "body", "why"),
    [
        ("gzip", TEXT, "incorrect header check"),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-1], "it is truncated"),
        ("gzip", gzip.compress(NOISE, mtime=0)[:70_000], "it is truncated"),
        ("gzip", gzip.compress(TEXT, mtime=0)[:5], "it is truncated"),
        ("gzip", gzip.compress(TEXT, mtime=0)[:-8] + b"\0" * 8, "incorrect data check"),
        ("gzip", gzip.compress(TEXT, mtime=0) + b"more", "incorrect header check"),
        ("gzip", zlib.compress(TEXT), "incorrect header check"),
        ("deflate", zlib.compress(TEXT)[:-1], "it is truncated"),
        ("deflate", raw(TEXT)[:-1], "it is truncated"),
        ("deflate", zlib.compress(TEXT) + b"m", "bytes follow its end"),
        ("deflate", gzip.compress(TEXT, mtime=0), "invalid"),
    ],
)
def test_a_body_that_cannot_be_decoded_is_the_clients_fault(coding, body, why, reading, send):
    answer = send(body, f"Content-Encoding: {coding}")
    assert (answer.status, answer.document["type"]) == (400, "BadRequestException")
    start = f"The Content-Encoding is {coding}, and the body cannot be decoded: "
    assert answer.document["message"].startswith(start)
    assert why in answer.document["message"]
    assert not reading.inputs


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "compress", "x" * 500])
def test_another_encoding_is_415(coding, reading, send):
    answer = send(TEXT, f"Content-Encoding: {coding}")
    assert (answer.status, answer.document["code"]) == (415, 415)
    assert answer.document["message"].startswith("Content-Encoding '" + coding[:80])
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert not reading.inputs


def test_two_headers_of_the_encoding_are_415(send):
    assert send(TEXT, "Content-Encoding: gzip", "Content-Encoding: gzip").status == 415


@pytest.mark.parametrize("encode", [gzip.compress, zlib.compress])
def test_a_bomb_is_refused_at_the_limit(encode, reading, send):
    """64 MB, of which no more than the limit is ever decoded."""
    coding = "gzip" if encode is gzip.compress else "deflate"
    body = encode(bytes(1 << 26))
    answer = send(body, f"Content-Encoding: {coding}")
    assert (answer.status, answer.document["type"]) == (413, "PayloadTooLargeException")
    assert "The decoded request body is longer than" in answer.document["message"]
    counted = []
    with pytest.raises(PayloadTooLarge):
        counted.extend(decoded(body, coding, LIMIT))
    assert sum(counted) <= LIMIT
    assert not reading.inputs


def test_a_decoded_body_of_exactly_the_limit(reading, send):
    assert send(gzip.compress(bytes(LIMIT)), "Content-Encoding: gzip").status == 200
    assert send(gzip.compress(bytes(LIMIT + 1)), "Content-Encoding: gzip").status == 413
    assert len(reading.inputs) == 1
