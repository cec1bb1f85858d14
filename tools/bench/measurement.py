"""The results of the load generator's runs, which all reports are made from."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Point:
    """The load and the server's settings of a run; None leaves a setting unchanged.

    Attributes:
        clients: Connections with one request in flight each; None for an open loop.
        rate: Requests per second, sent independently of the answers; None for a closed loop.
        performance_hint: OpenVINO's, which sets what no other setting sets (marserve only).
        batch_size: The model's maximum batch size; "auto": found by measuring (marserve only).
        max_batch_delay_ms: The model's maximum batch delay, milliseconds.
        workers: The model's number of workers.
        precision: The model's precision, a name that handlers accept.
        batch_policy: The model's batch policy (marserve only; TorchServe has only "fixed").
        max_latency_ms: The latency goal of the policy "adaptive", milliseconds (marserve only).
        torch_threads: Threads of torch in each worker, or "auto" (marserve only).
        outstanding_batches: Batches sent to a worker before it answers (marserve only).
    """

    clients: int | None = None
    rate: float | None = None
    batch_size: int | str | None = None
    max_batch_delay_ms: float | None = None
    workers: int | None = None
    precision: str | None = None
    batch_policy: str | None = None
    max_latency_ms: float | None = None
    torch_threads: int | str | None = None
    outstanding_batches: int | None = None
    performance_hint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The results of a run.

    Latencies start when a request is due: in an open loop at its scheduled time, so that they
    include the time it waited for a slow server (no coordinated omission).

    Attributes:
        point: The load and the settings.
        seconds: Length of the measured part, without the warm-up.
        answers: Successful answers in the measured part.
        errors: Failed requests by status ("503") or cause ("connection reset").
        latencies_ms: Latencies of the successful answers, milliseconds, ascending.
        first_inference_ms: Latency of a single request before the warm-up; None if unknown.
        mean_batch: Requests per batch by the server's metrics; None if it has none.
        goal_ms: The latency goal that the run is compared with, milliseconds; None without one.
        refused: Under a goal, requests that the server refused; without one they are errors.
        timeline: Successful answers in each second of the run.
    """

    point: Point
    seconds: float
    answers: int
    errors: Mapping[str, int] = field(default_factory=dict)
    latencies_ms: Sequence[float]
    first_inference_ms: float | None = None
    mean_batch: float | None = None
    goal_ms: float | None = None
    refused: int = 0
    timeline: Sequence[int] = ()

    @property
    def throughput(self) -> float:
        """Successful answers per second."""
        return self.answers / self.seconds

    @property
    def failed(self) -> int:
        """Number of failed requests."""
        return sum(self.errors.values())

    @property
    def requests(self) -> int:
        """Number of requests in the measured part."""
        return self.answers + self.failed + self.refused

    def within(self, latency_ms: float) -> int:
        """Return the number of successful answers within a latency."""
        return bisect_right(self.latencies_ms, latency_ms)

    @property
    def mean_ms(self) -> float:
        """Mean latency, milliseconds; NaN without answers."""
        return sum(self.latencies_ms) / self.answers if self.answers else float("nan")

    def percentile_ms(self, percent: float) -> float:
        """Return a percentile of the latencies, milliseconds; NaN without answers."""
        return percentile(self.latencies_ms, percent)

    def failure(self, allowed_error_share: float) -> str:
        """Return a sentence with the reason why this run has failed; empty if it has not.

        Errors are fast: with more of them than allowed, throughput and latencies mean nothing.
        Under a latency goal, refusals are no errors.

        Args:
            allowed_error_share: Largest accepted share of failed requests, from 0 to 1.
        """
        kinds = format_kinds({**self.errors, "refused": self.refused})
        if not self.answers:
            return f"Not one request was answered with success: {kinds or 'no answer'}."
        share = self.failed / self.requests
        if share > allowed_error_share:
            allowed = f"{allowed_error_share:.2%} are allowed"
            return f"{share:.2%} of the requests failed, {allowed}: {kinds}."
        return ""


def format_kinds(errors: Mapping[str, int]) -> str:
    """Return the numbers of errors by kind, the most frequent first: "503 (12), timeout (1)"."""
    ordered = sorted(errors.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{kind} ({count})" for kind, count in ordered if count)


def percentile(ascending: Sequence[float], percent: float) -> float:
    """Return a percentile by the nearest-rank definition; NaN without values."""
    if not ascending:
        return float("nan")
    # Rounded before ceil: 99.9 is not exact in binary, and the excess would raise the rank by one.
    rank = math.ceil(round(len(ascending) * percent / 100, 6))
    return ascending[max(0, rank - 1)]


@dataclass(frozen=True, kw_only=True)
class Target:
    """The measured server and model.

    Attributes:
        server: Name and version, as far as known: "marserve 0.1.0", "TorchServe 0.12.0".
        url: URL of the inference listener.
        model: The model's name, with its version if the command line has one.
    """

    server: str
    url: str
    model: str


@dataclass(frozen=True, kw_only=True)
class Session:
    """All runs of one call of ``marserve bench``.

    Attributes:
        target: The measured server and model.
        command: The command line that repeats the session.
        began: Start of the session, UTC, ISO 8601.
        machine: Facts about the client's machine, by name: processor, cores, system, Python.
        measurements: In the order of the runs; repetitions have equal points.
        allowed_error_share: Largest accepted share of failed requests of a run, from 0 to 1.
    """

    target: Target
    command: str
    began: str
    machine: Mapping[str, str]
    measurements: Sequence[Measurement]
    allowed_error_share: float = 0.0
