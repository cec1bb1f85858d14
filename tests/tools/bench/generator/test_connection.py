"""Where an answer ends, whatever pieces it comes in."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httptools")

from marserve.tools.bench.generator.connection import Connection

BODY = b"HTTP/1.1 200 OK\r\n\r\n"  # a body that looks like an answer
LENGTH = b"Content-Length: %d\r\n\r\n" % len(BODY)
CHUNKS = b"7;name=x\r\nHTTP/1.\r\n%x\r\n" % (len(BODY) - 7) + BODY[7:] + b"\r\n0\r\n\r\n"

WHOLE = {
    "length": (b"HTTP/1.1 200 OK\r\n" + LENGTH + BODY, ""),
    "length in capitals": (b"HTTP/1.1 200 OK\r\nCONTENT-LENGTH:19  \r\n\r\n" + BODY, ""),
    "no body": (b"HTTP/1.1 204 No Content\r\nserver: x\r\n\r\n", ""),
    "empty body": (b"HTTP/1.1 503 \r\ncontent-length: 0\r\n\r\n", "503"),
    "refused": (b"HTTP/1.1 503 \r\nRetry-After: 1\r\ncontent-length: 0\r\n\r\n", "503 refused"),
    "chunks": (b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n" + CHUNKS, ""),
    "trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nx: y\r\n\r\n",
        "",
    ),
    "interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n"
        b"HTTP/1.1 404 Not Found\r\n" + LENGTH + BODY,
        "404",
    ),
    "old and kept alive": (
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n" + LENGTH + BODY,
        "",
    ),
}
CLOSING = {
    "said so": (b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + LENGTH + BODY, ""),
    "old": (b"HTTP/1.0 200 OK\r\n" + LENGTH + BODY, ""),
}
UNTIL_THE_END = {
    "no length": (b"HTTP/1.1 200 OK\r\n\r\n" + BODY, ""),
    "no length, after an interim answer": (
        b"HTTP/1.1 103 Early Hints\r\nContent-Length: 5\r\n\r\nHTTP/1.1 500 x\r\n\r\n" + BODY,
        "500",
    ),
}
CUT_SHORT = {
    "nothing": b"",
    "in the head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "in the body": b"HTTP/1.1 200 OK\r\n" + LENGTH + BODY[:-1],
    "in the body of a last answer": b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + LENGTH + b"H",
    "in chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + CHUNKS[:-3],
    "behind an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
}


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.ends: list[str] = []
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.ends.append("closed")

    def abort(self) -> None:
        self.ends.append("aborted")


class Recorder:
    """Writes down what became of requests, and asks again at once where it can."""

    def __init__(self, questions: int = 1) -> None:
        self.answers: list[tuple[float, object]] = []
        self.questions = questions

    def answered(self, connection: Connection, due: float, kind: str) -> None:
        self.answers.append((due, kind))
        if len(self.answers) < self.questions and not connection.is_closed:
            connection.send(b"again", due + 1)

    def failed(self, connection: Connection, due: float, kind: str) -> None:
        assert connection.is_closed
        self.answers.append((due, kind))


def asked(questions: int = 1) -> tuple[Connection, Recorder, Any]:
    recorder, transport = Recorder(questions), Transport()
    connection = Connection(recorder)
    connection.connection_made(transport)
    connection.send(b"question", 1.0)
    return connection, recorder, transport


def feed(connection: Connection, data: bytes, cuts: set[int]) -> None:
    for begin, end in pairwise(sorted({0, len(data), *(cut % len(data) for cut in cuts)})):
        connection.data_received(data[begin:end])


@given(
    st.lists(st.sampled_from([*WHOLE.values()]), min_size=1, max_size=4),
    st.sets(st.integers(0, 1000), max_size=60),
)
def test_answers_in_any_pieces(answers, cuts):
    connection, recorder, _ = asked(len(answers))
    feed(connection, b"".join(data for data, _ in answers), cuts)
    assert recorder.answers == [(1.0 + n, kind) for n, (_, kind) in enumerate(answers)]
    assert not connection.is_closed
    assert connection.due == 0


@pytest.mark.parametrize("name", WHOLE)
def test_an_answer_byte_by_byte_ends_with_its_last_byte(name):
    data, kind = WHOLE[name]
    connection, recorder, _ = asked()
    feed(connection, data[:-1], set(range(len(data))))
    assert recorder.answers == []
    connection.data_received(data[-1:])
    assert recorder.answers == [(1.0, kind)]


@pytest.mark.parametrize("name", CLOSING)
def test_a_last_answer_closes_the_connection(name):
    data, kind = CLOSING[name]
    connection, recorder, transport = asked(2)
    feed(connection, data, {20, 40})
    assert recorder.answers == [(1.0, kind)]
    assert connection.is_closed
    assert transport.ends == ["closed"]
    connection.connection_lost(None)
    assert len(recorder.answers) == 1


@pytest.mark.parametrize("name", UNTIL_THE_END)
def test_an_answer_without_a_length_ends_with_the_connection(name):
    data, kind = UNTIL_THE_END[name]
    connection, recorder, _ = asked()
    feed(connection, data, {3, 30, 50})
    assert recorder.answers == []
    connection.connection_lost(None)
    assert recorder.answers == [(1.0, kind)]
    assert connection.is_closed


@pytest.mark.parametrize("error", [None, ConnectionResetError()])
@pytest.mark.parametrize("name", CUT_SHORT)
def test_half_an_answer_is_none(name, error):
    connection, recorder, _ = asked()
    if CUT_SHORT[name]:
        connection.data_received(CUT_SHORT[name])
    connection.connection_lost(error)
    assert recorder.answers == [(1.0, "connection reset" if error else "connection closed")]


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\nwhatever",
    ],
)
def test_what_is_no_answer_is_given_up(data):
    connection, recorder, transport = asked()
    connection.data_received(data)
    assert recorder.answers == [(1.0, "malformed answer")]
    assert transport.ends == ["aborted"]
    connection.connection_lost(None)
    assert len(recorder.answers) == 1


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_request_to_a_server_that_has_hung_up_fails(is_reported):
    connection, recorder, transport = asked()
    connection.data_received(WHOLE["length"][0])
    transport.closing = True
    if is_reported:
        connection.connection_lost(None)
    connection.send(b"again", 2.0)
    if not is_reported:
        assert recorder.answers == [(1.0, "")]
        connection.connection_lost(None)
    assert recorder.answers == [(1.0, ""), (2.0, "connection closed")]
    assert transport.written == [b"question"]


def test_an_answer_that_nobody_asked_for_is_nobodys():
    connection, recorder, _ = asked()
    data, _ = WHOLE["length"]
    connection.data_received(data + data)
    assert recorder.answers == [(1.0, "")]
    connection.connection_lost(None)
    assert len(recorder.answers) == 1
    assert connection.is_closed
