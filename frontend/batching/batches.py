"""Batches, and a history of the last of them for operators (`GET /models/{model}/batches`)."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from marserve.backend.protocol import Input, Piece, Prediction, Reply, SpanRecord
from marserve.frontend.batching.jobs import Job, OnRead
from marserve.frontend.errors import PredictionFailed, ServeError

_MAX_BATCHES = 512

_arrival_of: Callable[[Job], float] = attrgetter("arrived")


class Reason(Enum):
    """Why a batch was closed when it was."""

    FULL = "full"  # it has the largest size
    WINDOW = "window"  # the oldest job has waited for maxBatchDelay
    LIST = "list"  # it has all rows of a client's list
    SINGLE = "single"  # the window is over, and each job runs alone (`policies.FixedOrSingle`)
    NO_MORE_CLIENTS = "no_more_clients"  # every client has a request in flight already
    WORK_CONSERVING = "work_conserving"  # a worker was idle and waiting would not have paid
    TARGET = "target"  # held until it had the size that suits the load
    HOLD_EXPIRED = "hold_expired"  # held as long as holding could pay, and not filled
    EXPLORATION = "exploration"  # it has a size whose cost is to be learnt
    ALONE = "alone"  # a describe request, or a retry after a worker died
    SUSPECTED = "suspected"  # a request whose content has failed alone before
    ISOLATION = "isolation"  # a part of a batch that failed
    OUT_OF_MEMORY = "out_of_memory"  # a part of a batch that did not fit into memory


class Lengths(NamedTuple):
    """The lengths of the items of a batch; ``padding`` is the share of it, 0 to 1."""

    longest: float
    padding: float

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> "Lengths":
        """Return the lengths of jobs that are measured."""
        lengths = [job.length for job in jobs]
        longest = max(lengths)
        return cls(longest, 1 - sum(lengths) / (longest * len(jobs)) if longest else 0.0)

    def as_members(self) -> dict[str, float]:
        """Return them as members of the document of a batch."""
        return {"longest": round(self.longest, 3), "paddingShare": round(self.padding, 3)}


@dataclass(eq=False)  # without slots, the defaults of fields that are set later cost nothing
class Batch:
    """Jobs that a worker runs together, in order; at least one, until all are answered.

    After that it is the record of the batch. Moments are seconds on the monotonic clock; those of
    the handler are 0 if it did not finish.
    """

    jobs: Sequence[Job]
    closed: float
    reason: Reason = Reason.WORK_CONSERVING
    run_as: int = 0  # rows that the worker runs; those beyond the jobs are padding
    predicted: float = 0.0  # expected seconds in the worker; 0 if unknown
    held: float = 0.0  # seconds for which it was held although a worker was idle
    worker_id: int = 0  # set by the worker that runs it
    size: int = field(init=False)
    lengths: "Lengths | None" = field(default=None, init=False)  # if it was formed by them
    handler_started: float = field(default=0.0, init=False)
    handler_seconds: float = field(default=0.0, init=False)
    handler_paused: float = field(default=0.0, init=False)  # between stages, while others ran
    took: float = field(default=0.0, init=False)  # seconds until the answer; 0 while it runs
    succeeded: bool = field(default=False, init=False)
    handler_spans: Sequence[SpanRecord] = field(default=(), init=False)
    request_bytes: Sequence[int] = field(default=(), init=False)  # of each input (`read_sizes`)
    _waited: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.size = len(self.jobs)
        self.run_as = self.run_as or self.size

    def __len__(self) -> int:
        return self.size

    @property
    def waited(self) -> float:
        """Seconds that the oldest job, which may not be the first, had waited at closing."""
        if self._waited is None:
            self._waited = self.closed - min(map(_arrival_of, self.jobs))
        return self._waited

    def read_sizes(self) -> None:
        """Read the bytes of each input, as long as the batch has its jobs. Safe to call twice."""
        if not self.request_bytes:
            self.request_bytes = [job.input.size for job in self.jobs]

    def ran(self, reply: Reply) -> None:
        """Note when the handler ran."""
        self.handler_started = reply.handler_started
        self.handler_seconds = reply.handler_ms / 1000
        if reply.paused_ms:
            self.handler_paused = reply.paused_ms / 1000
        if reply.spans and any(job.is_recorded for job in self.jobs):
            self.handler_spans = reply.spans

    @property
    def handler_ended(self) -> float:
        """When the handler ended, or its last step until now; 0 if it did not finish."""
        return self.handler_started + self.handler_seconds + self.handler_paused

    def ran_step(self, reply: Reply) -> None:
        """Note one of the steps in which the handler ran: from the first to the last one."""
        self.handler_started = self.handler_started or reply.handler_started
        ended = reply.handler_started + reply.handler_ms / 1000
        self.handler_seconds = max(0.0, ended - self.handler_started)
        if reply.spans and any(job.is_recorded for job in self.jobs):
            self.handler_spans = [*self.handler_spans, *reply.spans]

    def release(self) -> None:
        """Drop the jobs, which hold what clients sent: all are answered, or are in other batches.

        Safe to call twice.
        """
        if self.jobs:
            self.waited  # noqa: B018 - it is read later
            self.jobs = ()

    @property
    def ids(self) -> Iterator[str]:
        """The ids of the requests."""
        return (job.input.id for job in self.jobs)

    @property
    def inputs(self) -> list[Input]:
        """The inputs of the jobs."""
        return [job.input for job in self.jobs]

    def deliver(self, predictions: Sequence[Prediction]) -> None:
        """Answer each job with its prediction; raises ValueError if their numbers differ."""
        for job, prediction in zip(self.jobs, predictions, strict=True):
            job.resolve(prediction)

    def push(self, piece: Piece, *on_read: OnRead) -> None:
        """Pass the predictions of a piece to their jobs; a failure goes to all jobs."""
        if piece.code != 200:
            self.fail(failure_of(piece))
        else:
            for place, prediction in zip(piece.places, piece.predictions, strict=True):
                self.jobs[place].push(prediction, *on_read)

    def fail(self, error: ServeError) -> None:
        """Answer every job with the same failure."""
        for job in self.jobs:
            job.fail(error)


def release_batches(jobs: Iterable[Job]) -> None:
    """Release the batches in which jobs were sent alone."""
    for job in jobs:
        if job.batch is not None:
            job.batch.release()


def failure_of(reply: Reply | Piece) -> ServeError:
    """Return the error that clients get for a failure."""
    cause = reply.cause if isinstance(reply, Reply) else ""
    return PredictionFailed(reply.message, status=reply.code, cause=cause)


class History:
    """The last batches of a model version; ``clock`` is the one of `Batch.closed`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._batches: deque[Batch] = deque(maxlen=_MAX_BATCHES)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __reversed__(self) -> Iterator[Batch]:
        return reversed(self._batches)

    def add(self, batch: Batch, seconds: float, *, succeeded: bool) -> None:
        """Record a finished batch, whose jobs are released soon."""
        batch.took, batch.succeeded = seconds, succeeded
        self._batches.append(batch)

    @property
    def last_closed_ms(self) -> int:
        """When the last batch was closed, in milliseconds since the epoch; 0 for none."""
        if not self._batches:
            return 0
        return round((time.time() - self._clock() + self._batches[-1].closed) * 1000)

    def documents(self, batches: Iterable[Batch] | None = None) -> Iterator[dict[str, Any]]:
        """Iterate over batches, or all, as JSON objects; times in milliseconds."""
        epoch = time.time() - self._clock()
        for batch in list(self._batches) if batches is None else batches:
            yield {
                "closedAt": round((epoch + batch.closed) * 1000),
                "size": batch.size,
                "ranAs": batch.run_as,
                "reason": batch.reason.value,
                "oldestWaitedMs": _ms(batch.waited),
                "heldMs": _ms(batch.held),
                "predictedMs": _ms(batch.predicted) if batch.predicted else None,
                "handlerMs": _ms(batch.handler_seconds),
                "tookMs": _ms(batch.took),
                "workerId": batch.worker_id,
                "succeeded": batch.succeeded,
                **(batch.lengths.as_members() if batch.lengths else {}),
            }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
