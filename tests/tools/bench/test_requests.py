"""The bytes of a request."""

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.payloads import Payload
from marserve.tools.bench.requests import request_bytes


def test_a_request():
    assert request_bytes("/p", "h:1", {"X": "y"}, Payload(b"body", "text/plain")) == (
        b"POST /p HTTP/1.1\r\nHost: h:1\r\nContent-Type: text/plain\r\nX: y\r\n"
        b"Content-Length: 4\r\n\r\nbody"
    )


def test_a_content_type_that_was_asked_for_is_the_only_one():
    made = request_bytes("/p", "h", {"content-type": "a/b"}, Payload(b"", "text/plain"))
    assert made.lower().count(b"content-type") == 1
    assert b"a/b" in made


@pytest.mark.parametrize(
    ("path", "header"),
    [("/a b", "x"), ("/a\r\nEvil: yes", "x"), ("/a", "x\r\nEvil: yes"), ("/a", "\u20ac")],
)
def test_what_http_cannot_carry_is_told(path, header):
    with pytest.raises(BenchError, match="cannot be sent"):
        request_bytes(path, "h", {"X": header}, Payload(b"", "text/plain"))
