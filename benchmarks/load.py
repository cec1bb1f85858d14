"""Closed-loop load, by the generator of ``marserve bench``; an answer without success is an error.

The clock starts with an answer and stops with an answer, each the last of a round of ``step``
answers. So a server that answers by the batch is measured over whole batches.
"""

from dataclasses import dataclass
from pathlib import Path

from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.processes import generate_now
from marserve.tools.bench.generator.record import Record
from marserve.tools.bench.generator.window import Measured as Part
from marserve.tools.bench.generator.window import measured_part
from marserve.tools.bench.measurement import percentile
from marserve.tools.bench.payloads import Payload
from marserve.tools.bench.requests import request_bytes

_BYTES = "application/octet-stream"
_FEWEST = 2  # answers: of a single one there is neither a rate nor a distribution


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
        content_type: Of the body.
        timeout: Seconds after which a request without an answer is an error.
    """

    port: int
    path: str
    body_file: str
    connections: int
    seconds: float
    warm_up: float = 0.5
    step: int = 1
    content_type: str = _BYTES
    timeout: float = 60.0


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
        RuntimeError: Not every request was answered with success, or fewer than two were.
        BenchError: Nobody is there to answer.
    """
    body = Path(plan.body_file).read_bytes()
    load = Load(
        clients=plan.connections,
        seconds=plan.seconds,
        warm_up=plan.warm_up,
        step=plan.step,
        timeout=plan.timeout,
    )
    part, _ = measure(load, plan.port, plan.path, Payload(body, plan.content_type))
    if part.errors:
        raise RuntimeError(f"Not every request was answered with success: {dict(part.errors)}")
    if len(part.latencies) < _FEWEST:
        raise RuntimeError("Fewer than two answers.")
    p50, p99 = (percentile(part.latencies, percent) * 1000 for percent in (50, 99))
    return Measured(len(part.latencies) / part.seconds, p50, p99)


def measure(load: Load, port: int, path: str, payload: Payload) -> tuple[Part, list[float]]:
    """Put a load on a server on loopback: what counts, and how late its generator was, seconds.

    Raises:
        RuntimeError: The server went away.
        BenchError: Nobody is there to answer.
    """
    all_of_it, warm = record(load, port, path, payload)
    return measured_part(all_of_it, load, warm), list(all_of_it.lateness)


def record(load: Load, port: int, path: str, payload: Payload) -> tuple[Record, float]:
    """Put a load on a server on loopback: every request, and when the warm-up was over.

    Raises:
        RuntimeError: The server went away.
        BenchError: Nobody is there to answer.
    """
    destination = Destination(f"http://127.0.0.1:{port}")
    request = request_bytes(path, destination.host, {}, payload)
    found, warm = generate_now(load, destination, [request])
    if found.stopped:
        raise RuntimeError(f"The server went away: {found.stopped}")
    return found, warm
