"""Open-loop load: requests leave at their own times, whether or not the earlier ones were answered.

Latency counts from the moment a request was due to leave, so that a server that stalls is charged
for everybody it kept waiting (no coordinated omission). The clients are as many keep-alive
connections as are needed at a time. It runs as a process of its own, like `load`.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop
from load import in_fresh_process

_MOST_CONNECTIONS = 4000
_UNAVAILABLE = b"503"
_OK = b"200"


@dataclass(frozen=True)
class Arrivals:
    """Poisson arrivals, and what is asked.

    Attributes:
        port: Of the server, on loopback.
        path: Where the bodies are posted.
        body_file: What is posted.
        rate: Requests per second.
        seconds: How long they come; those of the first ``warm_up`` seconds do not count.
        goal: Seconds within which an answer is good.
        seed: Of the arrivals: the same for those who are compared.
        warm_up: See ``seconds``.
    """

    port: int
    path: str
    body_file: str
    rate: float
    seconds: float
    goal: float
    seed: int
    warm_up: float = 0.5


@dataclass(frozen=True)
class Outcome:
    """What came of it; shares are of all requests that count.

    Attributes:
        good: Share answered 200 within the goal.
        late: Share answered 200 after it.
        refused: Share answered 503.
        p50_ms: Median latency of those answered 200, milliseconds.
        p99_ms: Their 99th percentile.
        mean_ms: Their mean.
        behind_ms: 99th percentile of what the generator itself was late in sending.
    """

    good: float
    late: float
    refused: float
    p50_ms: float
    p99_ms: float
    mean_ms: float
    behind_ms: float


def run(arrivals: Arrivals) -> Outcome:
    """Run it in a fresh process.

    Raises:
        subprocess.SubprocessError: It failed, mostly since an answer was neither 200 nor 503.
    """
    seconds = arrivals.warm_up + arrivals.seconds
    return Outcome(**in_fresh_process(__file__, asdict(arrivals), seconds))


class _Connection(asyncio.Protocol):
    """One request at a time; goes back to the idle ones with its answer."""

    def __init__(self, generator: "_Generator") -> None:
        self._generator = generator
        self._pending = b""
        self._due = 0.0

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        self._generator.idle = [one for one in self._generator.idle if one is not self]
        if self._due:
            self._generator.answered(self._due, b"closed")

    def ask(self, request: bytes, due: float) -> None:
        self._due = due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        data = self._pending + data
        end = data.find(b"\r\n\r\n")
        head = data[:end].lower()
        if end < 0 or len(data) < end + 4 + int(head.partition(b"content-length: ")[2].split()[0]):
            self._pending = data
            return
        self._pending, due, self._due = b"", self._due, 0.0
        self._generator.answered(due, data[9:12])
        if b"connection: close" in head:
            self._transport.close()
        else:
            self._generator.idle.append(self)


class _Generator:
    def __init__(self, arrivals: Arrivals, body: bytes) -> None:
        self._arrivals = arrivals
        head = (
            f"POST {arrivals.path} HTTP/1.1\r\nHost: 127.0.0.1:{arrivals.port}\r\n"
            f"Content-Type: application/octet-stream\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self.idle: list[_Connection] = []
        self._results: list[tuple[float, float, bytes]] = []
        self._behind: list[float] = []
        self._open = 0
        self._all_answered = asyncio.Event()
        self._began = 0.0

    async def run(self) -> Outcome:
        moments = self._moments()
        self._began = time.perf_counter() + 0.1
        for moment in moments:
            due = self._began + moment
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            self._open += 1
            connection = self.idle.pop() if self.idle else await self._connect()
            self._behind.append(time.perf_counter() - due)
            connection.ask(self._request, due)
        if self._open:
            self._all_answered.clear()
            await self._all_answered.wait()
        return self._outcome()

    def answered(self, due: float, status: bytes) -> None:
        self._results.append((due - self._began, time.perf_counter() - due, status))
        self._open -= 1
        if not self._open:
            self._all_answered.set()

    def _moments(self) -> list[float]:
        generator, moment = random.Random(self._arrivals.seed), 0.0
        moments = []
        while moment < self._arrivals.warm_up + self._arrivals.seconds:
            moment += generator.expovariate(self._arrivals.rate)
            moments.append(moment)
        return moments

    async def _connect(self) -> _Connection:
        if self._open > _MOST_CONNECTIONS:
            raise RuntimeError("The server has fallen too far behind.")
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: _Connection(self), "127.0.0.1", self._arrivals.port
        )
        return connection

    def _outcome(self) -> Outcome:
        counted = [one for one in self._results if one[0] >= self._arrivals.warm_up]
        strange = [status for *_, status in counted if status not in (_OK, _UNAVAILABLE)]
        if strange:
            raise RuntimeError(f"Neither 200 nor 503: {strange[0]!r}")
        latencies = [seconds for _, seconds, status in counted if status == _OK] or [0.0, 0.0]
        hundredths = statistics.quantiles(latencies, n=100, method="inclusive")
        good = sum(seconds <= self._arrivals.goal for seconds in latencies)
        return Outcome(
            good / len(counted),
            (len(latencies) - good) / len(counted),
            sum(status == _UNAVAILABLE for *_, status in counted) / len(counted),
            hundredths[49] * 1000,
            hundredths[98] * 1000,
            statistics.fmean(latencies) * 1000,
            statistics.quantiles(self._behind, n=100, method="inclusive")[98] * 1000,
        )


if __name__ == "__main__":
    given = Arrivals(**json.loads(sys.argv[1]))
    body = Path(given.body_file).read_bytes()

    async def _main() -> Outcome:
        return await _Generator(given, body).run()

    print(json.dumps(asdict(uvloop.run(_main()))))
