"""Servers that stop, drip, or say what no server says: a sentence, within the time."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from marserve.tools.bench import client
from marserve.tools.doctor import running
from marserve.tools.doctor.comparison import exchange
from marserve.tools.doctor.main import main

DESCRIPTION = {"info": {"title": "TorchServe APIs"}, "paths": {"/models": {"get": {}}}}
MODELS = {"models": [{"modelName": "m"}]}


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def drip_headers(connection, _):
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while True:
        connection.sendall(b"X: y\r\n")
        time.sleep(0.05)


def drip_body(connection, _):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def flood(connection, _):
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"[" * 65536)


def saying(document):
    """An answer to everything; of several, by the beginning of the request."""
    several = document if isinstance(document, list) else [("", document)]

    def answer(connection, head):
        text = next(text for start, text in several if head.startswith(start))
        connection.sendall(whole((text if isinstance(text, str) else json.dumps(text)).encode()))

    return answer


@contextmanager
def server(answer):
    """One connection after the other, closed behind its first answer."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    answer(connection, connection.recv(65536).decode())
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


@pytest.mark.parametrize("answer", [drip_headers, drip_body])
def test_a_server_that_drips_is_left_in_time(answer, monkeypatch, capsys):
    monkeypatch.setattr(running, "_TIMEOUT", 0.5)
    began = time.monotonic()
    with server(answer) as url:
        assert main(["--url", url]) == 2
    assert time.monotonic() - began < 5
    assert capsys.readouterr().err == f"marserve doctor: Nothing answers at {url}: timed out.\n"


def test_a_server_that_floods_is_read_to_a_bound(monkeypatch, capsys):
    monkeypatch.setattr(client, "MAX_ANSWER", 1 << 20)
    with server(flood) as url:
        assert main(["--url", url]) == 2
    assert "is no management interface" in capsys.readouterr().err


@pytest.mark.parametrize(
    "versions",
    [
        "[" * 100_000,
        5,
        [{"minWorkers": "x", "batchSize": "NaN", "workers": 5}, 7, None],
    ],
)
def test_a_server_that_describes_models_strangely(versions, capsys):
    answers = [("OPTIONS", DESCRIPTION), ("GET /models?", MODELS), ("GET /models/m/all", versions)]
    with server(saying([*answers, ("", "")])) as url:
        assert main(["--url", url]) == (2 if isinstance(versions, str) else 0)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("answer", [drip_headers, drip_body, flood])
def test_a_comparison_with_a_server_that_never_ends(answer, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(exchange, "MAX_ANSWER", 1 << 20)
    (tmp_path / "a.json").write_text("{}")
    sent = ["--model", "m", "--input", str(tmp_path / "a.json"), "--timeout", "0.1"]

    def pinged(connection, head):
        (saying({}) if head.startswith("GET /ping") else answer)(connection, head)

    began = time.monotonic()
    with server(saying({})) as old, server(pinged) as new:
        assert main(["--compare", old, new, *sent, "--repeat", "50"]) == 1
        assert time.monotonic() - began < 10
    out = capsys.readouterr().out
    assert f"{new}: no answer 10 times in a row; what was to follow was not sent [stopped]" in out
    assert "[no-answer]" in out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deep.json", "[" * 100_000),
        ("deep.yaml", "[" * 20_000),
        ("har.json", '{"log": {"entries": [{"request": 5}]}}'),
        ("har.json", '{"log": {"entries": [{"request": {"method": 5, "url": "http://x/a"}}]}}'),
        ("item.json", '{"path": "/predictions/m", "form": [1]}'),
    ],
)
def test_files_of_requests_that_are_broken(name, text, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    nobody = "http://127.0.0.1:1"
    assert main(["--compare", nobody, nobody, "--requests", str(tmp_path / name)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"marserve doctor: {tmp_path / name} ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
