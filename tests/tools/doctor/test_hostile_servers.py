"""Servers that stop, drip, or say what no server says: a sentence, within the time."""

import gzip
import json
import re
import socket
import threading
import time
from contextlib import contextmanager

import pytest

from marserve.tools.bench import client
from marserve.tools.doctor import running
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


def read_request(connection):
    """The head of a request; all of it is read, since unread bytes reset the connection."""
    head, _, body = connection.recv(65536).partition(b"\r\n\r\n")
    length = re.search(rb"(?i)^content-length: (\d+)", head, re.MULTILINE)
    while length and len(body) < int(length[1]) and (more := connection.recv(65536)):
        body += more
    return head.decode("latin-1")


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
                connection.settimeout(2)  # of a client that no longer reads
                try:
                    answer(connection, read_request(connection))
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
    assert (
        capsys.readouterr().err
        == f"marserve doctor: Nothing answers at {url}: no whole answer within 0.5 s.\n"
    )


def test_a_server_that_floods_is_read_to_a_bound(monkeypatch, capsys):
    monkeypatch.setattr(client, "MAX_ANSWER", 1 << 20)
    with server(flood) as url:
        assert main(["--url", url]) == 2
    assert "an answer of more than 1 MiB" in capsys.readouterr().err


def raw(content):
    """Bytes, whatever is asked."""
    return lambda connection, _: connection.sendall(content)


def stall(_, __):
    time.sleep(1)


def repeat(start, piece):
    def answer(connection, _):
        connection.sendall(start)
        while True:
            connection.sendall(piece * 2000)

    return answer


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (repeat(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), "the answer is not HTTP"),
        (repeat(b"HTTP/1.1 200 OK\r\nX: ", b"yyyyyyyyyy"), "the answer is not HTTP"),
        (repeat(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "no whole answer within 0.5 s"),
        (
            repeat(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
                b"X: y\r\n",
            ),
            "no whole answer within 0.5 s",
        ),
        (raw(b"\0\xff\x1b[31m\r\n\r\n"), "the answer is not HTTP"),
        (raw(b"HTTP/1.1 abc \x1b[31m\r\n\r\n"), "the answer is not HTTP"),
        (raw(b""), "remote end closed connection"),
        (stall, "no whole answer within 0.5 s"),
        (raw(whole(b"\xff\xfe{")), "is not a management interface"),
        (raw(whole(b"9" * 1_000_000)), "is not a management interface"),
        (raw(whole(b"[" * 1_000_000)), "is not a management interface"),
        (raw(whole(gzip.compress(bytes(64 << 20)))), "is not a management interface"),
        (raw(b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"), "302"),
        (raw(b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n"), "302"),
    ],
)
def test_an_answer_that_is_none_is_told_in_a_line(answer, reason, monkeypatch, capsys):
    monkeypatch.setattr(running, "_TIMEOUT", 0.5)
    began = time.monotonic()
    with server(answer) as url:
        assert main(["--url", url]) == 2
    assert time.monotonic() - began < 10
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


def test_a_handshake_that_drips_has_an_end(monkeypatch, capsys):
    monkeypatch.setattr(running, "_TIMEOUT", 0.5)

    def drip(connection, _):
        connection.sendall(
            b"\x16\x03\x03\x01\x00\x02\x00\x00\xfc"
        )  # the first bytes of a ServerHello
        while True:
            connection.sendall(b"\x03")
            time.sleep(0.05)

    began = time.monotonic()
    with server(drip) as url:
        assert main(["--url", url.replace("http:", "https:"), "--insecure"]) == 2
    assert time.monotonic() - began < 5
    assert "no whole answer within 0.5 s" in capsys.readouterr().err


def test_a_server_with_answers_without_number_is_left_in_time(monkeypatch, capsys):
    monkeypatch.setattr(running, "_MAX_SECONDS", 0.5)
    pages = {"models": [], "nextPageToken": "1"}
    with server(saying([("OPTIONS", DESCRIPTION), ("", pages)])) as url:
        assert main(["--url", url]) == 2
    assert "did not answer everything within 0.5 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    "models", [{"models": [{"modelName": "\ud800"}]}, {"models": [], "nextPageToken": "\ud800"}]
)
def test_half_of_a_character_is_sent_as_a_question_mark(models, capsys):
    answers = [("OPTIONS", DESCRIPTION), ("GET /models?limit=100 ", models)]
    rest = [
        ("GET /models?limit=100&next_page_token=%3F ", {"models": []}),
        ("GET /models/%3F/", []),
    ]
    with server(saying([*answers, *rest, ("", "")])) as url:
        assert main(["--url", url]) == 0
    assert "1 source read" in capsys.readouterr().out


def test_an_answer_has_a_limit(capsys):
    answers = [("OPTIONS", DESCRIPTION), ("GET /models?", MODELS)]
    with server(saying([*answers, ("", [{"modelVersion": "1" * (2 << 20)}])])) as url:
        assert main(["--url", url]) == 2
    assert "/models/m/all sends more than 2 MiB in an answer." in capsys.readouterr().err


def test_long_names_are_cut(capsys):
    long = "1" * 100_000
    described = {"info": {"title": long, "version": long}, "paths": {long: {"get": {}}}}
    version = [{"minWorkers": 1, "modelVersion": long, "modelUrl": long}]
    answers = [("OPTIONS", described), ("GET /models?", MODELS), ("GET /models/", version)]
    with server(saying([*answers, ("", "")])) as url:
        assert main(["--url", url, "--json"]) == 0
    assert len(capsys.readouterr().out) < 10_000


def test_findings_have_a_limit(monkeypatch, capsys):
    monkeypatch.setattr(running, "_MAX_FINDINGS", 10)
    paths = {f"/{number}": {"get": {}} for number in range(20)}
    with server(saying({**DESCRIPTION, "paths": paths})) as url:
        assert main(["--url", url, "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [each["rule"] for each in findings] == ["not-read"] + ["endpoint"] * 10


@pytest.mark.parametrize(
    "text", ["ours 1\n" * 400_000, 'ours{x="' + "1" * 5000 + '"} 1\n', "ours 1\nx 1\n" * 500]
)
def test_long_metrics_are_not_parsed(text, capsys):
    answers = [("OPTIONS", DESCRIPTION), ("GET /models?", {"models": []}), ("GET /metrics", text)]
    with server(saying(answers)) as url:
        assert main(["--url", url, "--metrics-url", url]) == 0
    is_told = "2 metrics are not built in: ours, x [" in capsys.readouterr().out
    assert is_told == text.startswith("ours 1\nx")


def test_what_servers_say_cannot_control_the_terminal(capsys, tmp_path):
    controls = "\x1b]0;x\x07\x1b[31m\x9b2J\x7f\u202e"
    described = {"info": {"title": controls, "version": controls}, "paths": {controls: {"get": 1}}}
    models = {"models": [{"modelName": controls}]}
    version = [{"minWorkers": 1, "modelVersion": controls, "modelUrl": controls}]
    answers = [("OPTIONS", described), ("GET /models?", models), ("GET /models/", version)]
    (tmp_path / "a.json").write_text("{}")
    sent = ["--model", "m", "--input", str(tmp_path / "a.json"), "--repeat", "1"]
    error = f"HTTP/1.1 503 {controls[:3]}\r\nX: {controls[:3]}\r\n\r\n{controls}".encode()
    with server(saying([*answers, ("", "")])) as url, server(raw(error)) as bad:
        for arguments in (
            ["--url", url],
            ["--url", url, "--verbose"],
            ["--url", bad],
            ["--compare", url, bad, *sent],
            ["--compare", bad, url, *sent],
        ):
            main(arguments)
            told = "".join(capsys.readouterr())
            assert "\\u001b]0;x" in told, arguments
            assert told.replace("\n", "").isprintable()


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
    monkeypatch.setattr(client, "MAX_ANSWER", 1 << 20)
    (tmp_path / "a.json").write_text("{}")
    sent = ["--model", "m", "--input", str(tmp_path / "a.json"), "--timeout", "0.1"]

    def pinged(connection, head):
        (saying({}) if head.startswith("GET /ping") else answer)(connection, head)

    began = time.monotonic()
    with server(saying({})) as old, server(pinged) as new:
        assert main(["--compare", old, new, *sent, "--repeat", "50"]) == 1
        assert time.monotonic() - began < 10
    out = capsys.readouterr().out
    assert (
        f"{new}: no answer 10 times in a row; the remaining requests were not sent [stopped]" in out
    )
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
