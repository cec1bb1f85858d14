"""Open-loop load, by the generator of ``marserve bench``, judged by a latency goal.

Requests leave at their own times, whether or not the earlier ones were answered; latency counts
from the moment a request was due to leave (no coordinated omission).
"""

import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from load import measure, record

from marserve.tools.bench.generator.connection import REFUSED
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.measurement import percentile
from marserve.tools.bench.payloads import Payload

_MOST_CONNECTIONS = 4000
_REFUSED = {"503", REFUSED}
_FEWEST = 2


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

    Latencies are not a number where nothing was answered with success.

    Attributes:
        good: Share answered with success within the goal.
        late: Share answered with success after it.
        refused: Share answered 503.
        p50_ms: Median latency of the successful answers, milliseconds.
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
        RuntimeError: An answer was neither a success nor 503, or there were fewer than two.
        BenchError: Nobody is there to answer.
    """
    part, lateness = measure(
        _load(arrivals), arrivals.port, arrivals.path, _payload(arrivals.body_file)
    )
    _check_kinds(part.errors)
    refused = sum(part.errors.values())
    latencies = list(part.latencies)
    good, count = bisect_right(latencies, arrivals.goal), len(latencies) + refused
    if count < _FEWEST:
        raise RuntimeError("Fewer than two answers.")
    return Outcome(
        good / count,
        (len(latencies) - good) / count,
        refused / count,
        percentile(latencies, 50) * 1000,
        percentile(latencies, 99) * 1000,
        (statistics.fmean(latencies) if latencies else math.nan) * 1000,
        percentile(sorted(lateness), 99) * 1000,
    )


def shares_in_time(arrivals: Arrivals, blocks: int) -> list[float]:
    """Shares answered within the goal, of so many equal blocks of requests, one after the other.

    Requests are in the order in which they were due; a refused one, of which that is not known, as
    if it was due when it was refused. Run in a fresh process.

    Raises:
        RuntimeError: An answer was neither a success nor 503.
        BenchError: Nobody is there to answer.
    """
    found, warm = record(
        _load(arrivals), arrivals.port, arrivals.path, _payload(arrivals.body_file)
    )
    _check_kinds(found.kinds)
    answers = zip(found.ended, found.latencies, strict=True)
    fates = [(end - latency, latency <= arrivals.goal) for end, latency in answers]
    fates = sorted(fates + [(end, False) for end in found.failed])
    fates = [fate for fate in fates if fate[0] >= warm]
    length = math.ceil(len(fates) / blocks)
    return [
        statistics.fmean(good for _, good in fates[start : start + length])
        for start in range(0, len(fates), length)
    ]


def _load(arrivals: Arrivals) -> Load:
    return Load(
        rate=arrivals.rate,
        seconds=arrivals.seconds,
        warm_up=arrivals.warm_up,
        seed=arrivals.seed,
        max_connections=_MOST_CONNECTIONS,
    )


def _payload(body_file: str) -> Payload:
    return Payload(Path(body_file).read_bytes(), "application/octet-stream")


def _check_kinds(kinds: Iterable[str]) -> None:
    if others := set(kinds) - _REFUSED:
        raise RuntimeError(f"Neither success nor 503: {sorted(others)}")
