"""What is sent to receivers that misbehave, and what is counted as dropped."""

import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing
from itertools import repeat
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from otel_receiver import RawReceiver, run_raw_receiver

from marserve.frontend.telemetry.trace_context import TraceContext
from marserve.frontend.tracing.otel_spans import OtlpSpans
from marserve.frontend.tracing.time_lines import TimeLine, TimeLines

pytestmark = pytest.mark.timeout(60)

EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
MIB = 1 << 20
SPANS = 2


@pytest.fixture(autouse=True)
def timeout(monkeypatch):
    """The time that the exporter has for a message, in seconds."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")


def spans_to(receiver: RawReceiver) -> AbstractContextManager[OtlpSpans]:
    return closing(OtlpSpans(f"{receiver.url}/v1/traces"))


def add_requests(spans: OtlpSpans, attributes: Mapping[str, Any] = MappingProxyType({})) -> None:
    model = TimeLines().of_model("m", "1.0")
    trace = TraceContext("1" * 32, "2" * 16, 1).recorded()._replace(attributes=attributes)
    line = TimeLine("id", model, 0.0, 0.0, None, 1.0, trace=trace)
    spans.add([line] * (SPANS // 2))


def sent(answer: bytes) -> Callable[[socket.socket], object]:
    return lambda connection: connection.sendall(answer)


def drip(start: bytes, piece: bytes, pause: float) -> Callable[[socket.socket], object]:
    """Answer with pieces that do not end."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        for each in repeat(piece):
            connection.sendall(each)
            time.sleep(pause)

    return answer


def dropped(answer: Callable[[socket.socket], object]) -> tuple[int, float, int]:
    """Return how many spans are dropped, the seconds, and the number of messages."""
    with run_raw_receiver(answer) as receiver, spans_to(receiver) as spans:
        add_requests(spans)
        began = time.monotonic()
        return spans.send(), time.monotonic() - began, receiver.messages


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000000\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
CLOSED = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (LENGTH, b"x" * MIB),
        (CHUNKED, b"100000\r\n%b\r\n" % (b"x" * MIB)),
        (CLOSED, b"x" * MIB),
    ],
)
def test_an_endless_body_takes_neither_memory_nor_time(start, piece):
    process = psutil.Process()
    before = process.memory_info().rss
    count, seconds, _ = dropped(drip(start, piece, 0))
    assert count == 0
    assert seconds < 5
    assert process.memory_info().rss - before < 100 * MIB


@pytest.mark.parametrize(
    ("start", "piece"), [(LENGTH, b"x"), (CHUNKED, b"1\r\nx\r\n"), (CLOSED, b"x")]
)
def test_a_body_that_drips_does_not_hold_the_spans(start, piece):
    count, seconds, _ = dropped(drip(start, piece, 0.1))
    assert count == 0
    assert seconds < 5


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 100 Continue\r\n"])
def test_a_head_that_drips_ends_with_the_timeout(start):
    count, seconds, _ = dropped(drip(start, b"x", 0.1))
    assert count == SPANS
    assert seconds < 8


@pytest.mark.parametrize("status", [101, *range(300, 309), 400, 404, 500, 501, 999])
def test_spans_that_the_receiver_does_not_accept_are_dropped(status, caplog):
    head = f"HTTP/1.1 {status} So\r\nLocation: /v1/traces\r\nContent-Length: 0\r\n\r\n"
    count, _, messages = dropped(sent(head.encode()))
    assert count == SPANS
    assert messages == 1 or status >= 500  # which some versions of the exporter send again
    assert str(status) in caplog.text


@pytest.mark.parametrize("status", [200, 202, 204, 299])
def test_every_2xx_is_a_success(status):
    head = f"HTTP/1.1 {status} \r\nContent-Length: 0\r\n\r\n"
    assert dropped(sent(head.encode()))[0] == 0


@pytest.mark.parametrize("body", [b"", b"x" * 100])
def test_a_connection_is_used_again(body):
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with run_raw_receiver(sent(answer)) as receiver, spans_to(receiver) as spans:
        for _ in range(3):
            add_requests(spans)
            assert spans.send() == 0
        assert (receiver.messages, receiver.connections) == (3, 1)


def test_a_busy_receiver_gets_the_spans_again():
    answers = iter([b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n", EMPTY])
    count, seconds, messages = dropped(lambda connection: connection.sendall(next(answers)))
    assert (count, messages) == (0, 2)
    assert seconds < 3


def test_a_receiver_that_wants_to_be_asked_later_gets_no_more_spans():
    head = b"HTTP/1.1 429 Later\r\nRetry-After: 1000\r\nContent-Length: 0\r\n\r\n"
    count, seconds, _ = dropped(sent(head))
    assert count == SPANS
    assert seconds < 5


def test_text_of_the_receiver_writes_no_lines_of_its_own(caplog):
    head = b"HTTP/1.1 400 " + b"\x1b[2J" * 10_000 + b"\r\nContent-Length: 0\r\n\r\n"
    assert dropped(sent(head))[0] == SPANS
    assert "\x1b" not in caplog.text
    assert len(caplog.text) < 5000


def test_attributes_of_clients_leave_no_lines_in_the_log(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "10")
    attributes = {"": "no name", "url.path": "/" + "x" * 100, "half": "\ud800", "\udfff": 1}
    with run_raw_receiver(sent(EMPTY)) as receiver, spans_to(receiver) as spans:
        add_requests(spans, attributes)
        assert spans.send() == 0
    assert caplog.records == []


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "-1", "soon"])
def test_a_timeout_that_is_none_is_no_traceback(seconds, monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", seconds)
    assert dropped(sent(EMPTY))[0] in (0, SPANS)
    assert not any(record.exc_info for record in caplog.records)
