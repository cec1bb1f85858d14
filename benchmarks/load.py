"""The load generator: closed-loop HTTP/1.1 clients over keep-alive connections.

It runs as a process of its own and does next to nothing per request, for it shares the machine with
what it measures: the request is built once, an answer is looked at just enough to know its status
and its end. Anything but 200 ends the run with an error.

The clock starts with an answer and stops with an answer, each the last of a round of ``step``
answers. So a server that answers by the batch is measured over whole batches; by wall time alone a
run of ten batches would be uncertain by one in ten.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

_LENGTH = b"content-length: "
# What a run may take beyond its warm-up and its seconds.
_GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What is to be sent, and for how long.

    Attributes:
        port: Of the server, on loopback.
        path: Where the bodies are posted.
        body_file: What is posted, again and again.
        connections: Each has one request in flight, always.
        seconds: The shortest time measured.
        warm_up: Seconds before that.
        step: Answers per round, see the module.
    """

    port: int
    path: str
    body_file: str
    connections: int
    seconds: float
    warm_up: float = 0.5
    step: int = 1


@dataclass(frozen=True)
class Measured:
    """What came of it.

    Attributes:
        rate: Answers per second.
        p50_ms: Median latency, milliseconds.
        p99_ms: 99th percentile of the latency.
    """

    rate: float
    p50_ms: float
    p99_ms: float


def generate(plan: Plan) -> Measured:
    """Run a plan in a fresh process.

    Raises:
        subprocess.SubprocessError: It failed, mostly since an answer was not 200; it said why.
    """
    return Measured(**in_fresh_process(__file__, asdict(plan), plan.warm_up + plan.seconds))


def in_fresh_process(program: str, plan: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Run a load generator's file with its plan as JSON; returns the JSON object it prints.

    Raises:
        subprocess.SubprocessError: It failed, or took a minute longer than ``seconds``.
    """
    finished = subprocess.run(
        [sys.executable, program, json.dumps(plan)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=seconds + _GRACE_SECONDS,
    )
    printed: dict[str, Any] = json.loads(finished.stdout)
    return printed


class _Tally:
    """The answers of all connections, and the clock."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._from = time.perf_counter() + plan.warm_up
        self._until = 0.0
        self._answers = 0
        self._began = 0.0
        self._latencies: list[float] = []
        self.finished: asyncio.Future[Measured] = asyncio.get_running_loop().create_future()

    def add(self, sent: float, now: float) -> None:
        """Count an answer to what was sent at that moment."""
        self._answers += 1
        if self._began:
            self._latencies.append(now - sent)
        if now >= self._from and not self._answers % self._plan.step:
            self._end_round(now)

    def fail(self, why: str) -> None:
        """End the run with an error."""
        if not self.finished.done():
            self.finished.set_exception(RuntimeError(why))

    def _end_round(self, now: float) -> None:
        if not self._began:
            self._began = now
            self._from = now + self._plan.seconds
        elif not self.finished.done():
            self.finished.set_result(self._measured(now - self._began))

    def _measured(self, seconds: float) -> Measured:
        latencies = self._latencies
        hundredths = statistics.quantiles(latencies, n=100, method="inclusive")
        return Measured(len(latencies) / seconds, hundredths[49] * 1000, hundredths[98] * 1000)


class _Client(asyncio.Protocol):
    """One connection: sends, waits for the whole answer, sends again."""

    def __init__(self, request: bytes, tally: _Tally) -> None:
        self._request = request
        self._tally = tally
        self._pending = b""
        self._sent = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        head_end = data.find(b"\r\n\r\n")
        if head_end < 0 or len(data) < head_end + 4 + _body_length(data[:head_end]):
            self._pending = data
            return
        self._pending = b""
        if data[9:12] != b"200":
            self._tally.fail(f"Not 200: {data[:400]!r}")
        self._tally.add(self._sent, time.perf_counter())
        self._send()

    def connection_lost(self, _error: Exception | None) -> None:
        self._tally.fail("The server closed a connection.")

    def _send(self) -> None:
        self._sent = time.perf_counter()
        self._transport.write(self._request)


def _body_length(head: bytes) -> int:
    head = head.lower()
    start = head.index(_LENGTH) + len(_LENGTH)
    end = head.find(b"\r\n", start)
    return int(head[start:] if end < 0 else head[start:end])


async def _run(plan: Plan, body: bytes) -> Measured:
    head = (
        f"POST {plan.path} HTTP/1.1\r\nHost: 127.0.0.1:{plan.port}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body
    tally = _Tally(plan)
    loop = asyncio.get_running_loop()
    for _ in range(plan.connections):
        await loop.create_connection(lambda: _Client(request, tally), "127.0.0.1", plan.port)
    return await tally.finished


if __name__ == "__main__":
    given = Plan(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(uvloop.run(_run(given, Path(given.body_file).read_bytes())))))
