"""Servers that hang, drip, or say what no server says: a sentence and a status, in time."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from marserve.tools.bench.main import main

CONTROLS = "\x1b]0;x\x07\x1b[31m\x9b2J\x7f\u202e"
MODEL = {
    "modelName": "m",
    "modelVersion": "1",
    "modelUrl": "m.mar",
    "batchSize": 1,
    "maxBatchDelay": 1,
    "minWorkers": 1,
    "maxWorkers": 1,
    "workers": [{"status": "READY"}],
}
#: Requests that the server answers before it changes its mind.
ANSWERED = 5

Misbehaviour = Callable[[socket.socket], None]


def whole(text: str, status: int = 200) -> bytes:
    body = text.encode()
    return b"HTTP/1.1 %d OK\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def hang(connection: socket.socket) -> None:
    connection.recv(1)  # until the client leaves


def hang_behind_the_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n")
    hang(connection)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def flood(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def flood_head(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        connection.sendall(b"x" * 65536)


def close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def serving(misbehave: Misbehaviour, where: str, first: int = 0) -> Iterator[str]:
    """A server that misbehaves at requests that begin so, from the ``first`` one on."""
    numbers = count()

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                while head := connection.recv(65536).decode("latin-1"):
                    if head.startswith(where) and next(numbers) >= first:
                        misbehave(connection)
                        return
                    models = head.startswith("GET /models")
                    connection.sendall(whole(json.dumps([MODEL] if models else {})))
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def bench(url: str, *load: str) -> int:
    urls = ("--url", url, "--management-url", url, "--metrics-url", url)
    return main(["m", *urls, "--timeout", "0.5", "--warm-up", "0", "--no-progress", *load])


@pytest.mark.parametrize("load", [("--clients", "2"), ("--rate", "50")])
@pytest.mark.parametrize("misbehave", [hang, hang_behind_the_head, drip])
def test_a_server_that_falls_silent_ends_the_run(misbehave, load, capsys):
    began = time.monotonic()
    with serving(misbehave, "POST", ANSWERED) as url:
        assert bench(url, *load, "--requests", "100000") == 1
    assert time.monotonic() - began < 20
    assert "gone during the run: it gave no answer for 1 s." in capsys.readouterr().err


@pytest.mark.parametrize("misbehave", [flood, flood_head, close])
def test_answers_without_an_end_are_errors(misbehave, capsys):
    began = time.monotonic()
    with serving(misbehave, "POST", ANSWERED) as url:
        assert bench(url, "--clients", "2", "--seconds", "1") == 1
    assert time.monotonic() - began < 20
    assert "marserve bench: " in capsys.readouterr().err


@pytest.mark.parametrize("misbehave", [hang, drip, close])
@pytest.mark.parametrize("where", ["OPTIONS", "GET /models", "POST"])
def test_a_server_that_does_not_answer_at_all(where, misbehave, capsys):
    began = time.monotonic()
    with serving(misbehave, where) as url:
        settings = ("--batch-size", "2") if where.startswith("GET") else ()
        assert bench(url, *settings, "--clients", "1", "--seconds", "1") == 1
    assert time.monotonic() - began < 10
    assert "Nothing answers at" in capsys.readouterr().err


def test_what_a_server_says_cannot_control_the_terminal(capsys):
    def refuse(connection):
        connection.sendall(whole(CONTROLS, 503))

    with serving(refuse, "POST") as url:
        assert bench(url, "--clients", "1") == 1
    err = capsys.readouterr().err
    assert "\\u001b]0;x" in err
    assert err.replace("\n", "").isprintable()
