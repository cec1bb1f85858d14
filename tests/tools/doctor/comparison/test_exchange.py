"""Asking a server that may behave in any way."""

import socket
import threading
from contextlib import contextmanager

import pytest

from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.doctor.comparison.exchange import Request, Server

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextmanager
def serving(*scripts):
    """A server that says what each connection's script says to each request, and then closes."""
    heads = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        for script in scripts:
            connection, _ = listener.accept()
            with connection:
                for answer in script:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        received = connection.recv(65536)
                        if not received:
                            return
                        head += received
                    heads.append(head)
                    try:
                        for piece in answer if not isinstance(answer, bytes) else [answer]:
                            connection.sendall(piece)
                    except OSError:
                        return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = Server(Destination(url), {"Authorization": "Bearer ours"}, timeout=0.5)
    try:
        yield server, heads
    finally:
        server.close()
        thread.join(10)
        listener.close()


def endless():
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        yield b"1\r\nx\r\n"


def test_a_connection_is_kept_and_made_anew_when_the_server_closed_it():
    with serving([OK, OK], [OK]) as (server, heads):
        answers = [server.ask(Request("GET", "/ping")) for _ in range(3)]
    assert [(each.body, each.problem) for each in answers] == [(b"ok", "")] * 3
    assert len(heads) == 3


def test_headers_that_are_sent():
    recorded = {
        "authorization": "Bearer theirs",
        "Host": "old",
        "Accept-Encoding": "br",
        "X-A": "1",
    }
    with serving([OK]) as (server, heads):
        server.ask(Request("POST", "/p", recorded, b"{}"))
    (head,) = heads
    assert b"Authorization: Bearer ours\r\n" in head
    assert b"theirs" not in head
    assert b"Host: old" not in head
    assert b"Accept-Encoding: identity" in head
    assert b"X-A: 1" in head


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", "not HTTP (IncompleteRead)"),
        (b"nonsense\r\n\r\n", "not HTTP (BadStatusLine)"),
        (endless(), "no whole answer within 0.5 s"),
    ],
)
def test_answers_that_are_none(answer, problem):
    with serving([answer]) as (server, _):
        assert problem in server.ask(Request("GET", "/ping")).problem


def test_a_server_that_says_nothing():
    with serving([b""]) as (server, _):
        assert "closed connection" in server.ask(Request("GET", "/ping")).problem
    assert "refused" in server.ask(Request("GET", "/ping")).problem


def test_what_cannot_be_written():
    with serving([OK]) as (server, _), pytest.raises(BenchError, match="cannot be written"):
        server.ask(Request("GET", "/a b"))
