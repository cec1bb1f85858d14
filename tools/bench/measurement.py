"""What one run of the load generator found: the numbers every report is made of."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was set for a run: the load, and what the server was set to; None is "as it was".

    Attributes:
        clients: Connections with one request in flight each; None for an open loop.
        rate: Requests per second sent whatever comes back; None for a closed loop.
        batch_size: Of the model.
        max_batch_delay_ms: Of the model, milliseconds.
        workers: Of the model.
        precision: Of the model, a name that the handlers know.
        batch_policy: Of the model, one of marserve's; TorchServe has only "fixed".
        max_latency_ms: Of the model: the latency goal of marserve's policy "adaptive".
        torch_threads: Of each worker: with how many threads torch computes; marserve's only.
        outstanding_batches: Of each worker: batches that it is sent ahead; marserve's only.
    """

    clients: int | None = None
    rate: float | None = None
    batch_size: int | None = None
    max_batch_delay_ms: float | None = None
    workers: int | None = None
    precision: str | None = None
    batch_policy: str | None = None
    max_latency_ms: float | None = None
    torch_threads: int | None = None
    outstanding_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What came of a run.

    Latencies are counted from the moment a request was due: in an open loop that is when the
    schedule wanted it sent, so one that had to wait for a slow server counts its waiting as well
    (no coordinated omission).

    Attributes:
        point: What was set.
        seconds: How long was measured, without the warm-up.
        answers: Requests of that time that were answered with success.
        errors: Those that were not: by status ("503") or by what happened ("connection reset").
        latencies_ms: Of the successful answers, milliseconds, in ascending order.
        first_inference_ms: The very first request, alone, before the warm-up; None if unknown.
        mean_batch: Requests per batch, as the server counted them; None where it does not tell.
        timeline: Successful answers in each second of the run.
    """

    point: Point
    seconds: float
    answers: int
    errors: Mapping[str, int] = field(default_factory=dict)
    latencies_ms: Sequence[float]
    first_inference_ms: float | None = None
    mean_batch: float | None = None
    timeline: Sequence[int] = ()

    @property
    def throughput(self) -> float:
        """Successful answers per second."""
        return self.answers / self.seconds

    @property
    def failed(self) -> int:
        """Requests that were not answered with success."""
        return sum(self.errors.values())

    @property
    def mean_ms(self) -> float:
        """Mean latency, milliseconds; not a number without answers."""
        return sum(self.latencies_ms) / self.answers if self.answers else float("nan")

    def percentile_ms(self, percent: float) -> float:
        """The latency that so many percent of the answers kept within, milliseconds.

        See `percentile`. Not a number without answers.
        """
        return percentile(self.latencies_ms, percent)

    def failure(self, allowed_error_share: float) -> str:
        """Why this run says nothing about speed, in a sentence; empty where it does.

        A server that refuses everything answers very fast: the throughput of a run with more errors
        than are allowed is no throughput.

        Args:
            allowed_error_share: Of all requests, from 0 to 1.
        """
        if not self.answers:
            return "Not one request was answered with success."
        share = self.failed / (self.answers + self.failed)
        if share > allowed_error_share:
            return f"{share:.2%} of the requests failed; {allowed_error_share:.2%} are allowed."
        return ""


def percentile(ascending: Sequence[float], percent: float) -> float:
    """The value that so many percent of the values do not exceed; not a number without values.

    The nearest-rank definition: a value that occurred.
    """
    if not ascending:
        return float("nan")
    # Rounded first: 99.9 is no binary fraction, and a hair above a whole rank is one too many.
    rank = math.ceil(round(len(ascending) * percent / 100, 6))
    return ascending[max(0, rank - 1)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """What was measured.

    Attributes:
        server: "marserve 0.1.0", "TorchServe 0.12.0": name and version as far as it tells.
        url: Where it answers.
        model: The model's name, with its version where one was asked for.
    """

    server: str
    url: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Session:
    """All the runs of one call of ``marserve bench``.

    Attributes:
        target: What was measured.
        command: The command line, to be repeated.
        began: UTC, ISO 8601.
        machine: Facts about the machine of the client, by name: processor, cores, system, Python.
        measurements: In the order in which they ran; repetitions are those of an equal point.
        allowed_error_share: Of all requests of a run, from 0 to 1; with more it has failed.
    """

    target: Target
    command: str
    began: str
    machine: Mapping[str, str]
    measurements: Sequence[Measurement]
    allowed_error_share: float = 0.0
