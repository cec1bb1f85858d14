"""Where the time of a request went, and the largest share of it in one sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.tracing.time_lines import (
    ANSWERED,
    CANCELLED,
    EXPIRED,
    REFUSED,
    TimeLine,
)
from marserve.frontend.tracing.worker_history import READY, WorkerHistory

# A handler that takes this many times the usual time is explained further.
_SLOW = 2.0
# An input of this many times the usual bytes may be the cause.
_LARGE = 4.0
_SMALL_BYTES = 1000
_AROUND_SECONDS = 60.0


class Shares(NamedTuple):
    """The seconds of a request, in order; they add up to the time until its answer.

    Attributes:
        receiving: Until its body was received.
        waiting: In the queue, while no worker was idle.
        batching: In the queue, held for a larger batch.
        hand_over: From the batch's closing to the handler's start, and between overlapped stages.
        handler: In the handler, or in the worker if the handler did not finish.
        answering: From the handler's end to the answer.
    """

    receiving: float
    waiting: float
    batching: float
    hand_over: float
    handler: float
    answering: float

    @classmethod
    def of(cls, line: TimeLine) -> "Shares":
        """Return the shares of a request."""
        receiving, batch = line.queued - line.arrived, line.batch
        if batch is None:
            inside = line.answered - line.queued
            return (
                cls(receiving, 0.0, 0.0, 0.0, inside, 0.0)
                if line.nested
                else cls(receiving, inside, 0.0, 0.0, 0.0, 0.0)
            )
        waited = max(0.0, batch.closed - line.queued)
        batching = min(batch.held, waited)
        queue = receiving, waited - batching, batching
        started = min(batch.handler_started, line.answered)
        if not started:
            return cls(*queue, 0.0, line.answered - batch.closed, 0.0)
        handler = min(batch.handler_seconds, max(0.0, line.answered - started))
        rest = line.answered - started - handler
        paused = min(batch.handler_paused, max(0.0, rest))
        return cls(*queue, started - batch.closed + paused, handler, rest - paused)


@dataclass(frozen=True)
class Facts:
    """What else is known of a model: its last batches, usual requests and workers."""

    batches: Sequence[Batch] = ()
    request_bytes: Sequence[int] = ()
    workers: WorkerHistory = field(default_factory=WorkerHistory)


def explain(line: TimeLine, facts: Facts) -> str:
    """Return what took most of the time of a request, or why it failed, as one sentence."""
    if line.outcome == REFUSED:
        return line.error
    sentence = _about_nodes(line) if line.batch is None and line.nested else ""
    sentence = sentence or _largest_share(line, facts)
    if line.outcome == ANSWERED:
        return sentence
    if line.outcome == CANCELLED:
        return f"The client left after {time_text(line.took)}. {sentence}"
    if line.outcome == EXPIRED:
        return f"It expired after {time_text(line.took)}. {sentence}"
    return f"It failed after {time_text(line.took)}: {line.error or f'status {line.status}'}"


def _largest_share(line: TimeLine, facts: Facts) -> str:
    shares = Shares.of(line)
    name, seconds = max(zip(Shares._fields, shares, strict=True), key=lambda item: item[1])
    of = f"{time_text(seconds)} of {time_text(line.took)}"
    match name:
        case "receiving":
            return f"Its {size_text(line.size)} took {of} to arrive: the client or network is slow."
        case "waiting":
            return f"It waited {of} for a worker: {_why_waited(line, facts.workers)}."
        case "batching":
            assert line.batch is not None
            return f"It was held {of} for a larger batch (closed by: {line.batch.reason.value})."
        case "hand_over":
            assert line.batch is not None
            if line.batch.handler_paused > seconds / 2:
                return (
                    f"It waited {of} in worker {line.batch.worker_id} for its next stage, in which "
                    "other batches were."
                )
            return (
                f"Worker {line.batch.worker_id} began with it after {of}: its process was stopped "
                f"or busy, or reading {size_text(sum(line.batch.request_bytes) or line.size)}."
            )
        case "handler":
            return f"The handler took {of}{_why_slow(line, facts)}."
    return f"Its answer took {of} after the handler: the answer is large, or the server was busy."


def _about_nodes(line: TimeLine) -> str:
    inside = sum(each.took for each in line.nested)
    longest = max(line.nested, key=lambda each: each.took)
    return (
        f"Of {time_text(line.took)}, {time_text(inside)} were in {len(line.nested)} nodes, the "
        f"longest in {longest.model.name}: {time_text(longest.took)}."
    )


def _why_waited(line: TimeLine, workers: WorkerHistory) -> str:
    until = line.batch.closed if line.batch is not None else line.answered
    ready, states = workers.fewest_ready(line.queued, until)
    total = states.total()
    if line.attempts > 1:
        return f"the worker that had it died, and it ran {line.attempts} times"
    if not total:
        return "there was none"
    if ready < total:
        others = ", ".join(f"{n} {state}" for state, n in sorted(states.items()) if state != READY)
        return f"{total - ready} of {total} {_were(total - ready)} not ready ({others})"
    reason = line.batch.reason if line.batch is not None else None
    if reason is Reason.SUSPECTED:
        return "it ran alone, because the same content had failed before"
    return f"{'all ' if total > 1 else 'the '}{total} {READY} {_were(total)} busy"


def _why_slow(line: TimeLine, facts: Facts) -> str:
    nested = max(line.nested, key=lambda each: each.took, default=None)
    if nested is not None:
        inside = sum(each.took for each in line.nested)
        return (
            f"; {time_text(inside)} in {len(line.nested)} requests to other models, the longest "
            f"{time_text(nested.took)} to {nested.model.name}"
        )
    batch = line.batch
    if batch is None:
        return ""
    of_batch = f" for a batch of {batch.size}" if batch.size > 1 else ""
    others = [
        each
        for each in facts.batches
        if each is not batch and each.run_as == batch.run_as and each.handler_seconds
    ]
    usual = median([each.handler_seconds for each in others]) if others else 0.0
    if not usual or batch.handler_seconds < _SLOW * usual:
        return of_batch
    of_batch += f", usually {time_text(usual)}"
    largest = max([*batch.request_bytes, line.size])
    usual_bytes = _median(facts.request_bytes)
    if largest > _LARGE * usual_bytes and largest > usual_bytes + _SMALL_BYTES:
        whose = "its" if largest == line.size else "another request's"
        return (
            f"{of_batch}; {whose} input has {size_text(largest)}, usually {size_text(usual_bytes)}"
        )
    near = [each for each in others if abs(each.closed - batch.closed) < _AROUND_SECONDS]
    own = [each.handler_seconds for each in near if each.worker_id == batch.worker_id]
    foreign = [each.handler_seconds for each in near if each.worker_id != batch.worker_id]
    if own and median(own) > _SLOW * usual and (not foreign or median(foreign) < _SLOW * usual):
        return f"{of_batch}; worker {batch.worker_id} is slow in all its batches, others are not"
    return (
        f"{of_batch}; sizes and other batches are usual, so worker {batch.worker_id} was stopped "
        "or had no processor"
    )


def server_timing(line: TimeLine) -> str:
    """Return the value of the header Server-Timing (W3C), in milliseconds."""
    shares = zip(Shares._fields, Shares.of(line), strict=True)
    found = (*shares, ("total", line.took))
    return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in found)


def _median(values: Sequence[int]) -> int:
    return round(median(values)) if values else 0


def _were(count: int) -> str:
    return "was" if count == 1 else "were"


def time_text(seconds: float) -> str:
    """Format a duration, as ``12.5 s``, ``412 ms`` or ``0.4 ms``."""
    milliseconds = seconds * 1000
    if seconds >= 10:
        return f"{seconds:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"


def size_text(count: int) -> str:
    """Format a number of bytes, as ``8.1 MB``."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 1000)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"
