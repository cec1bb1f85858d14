"""Batches, and the record of the last of them that operators can look at.

A record is one tuple in a ring: what a batch was, why it left, and what it cost. It becomes a
document only when somebody asks for it.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import ServeError

_MAX_RECORDS = 512

_arrival_of: Callable[[Job], float] = attrgetter("arrived")


class Reason(Enum):
    """Why a batch left when it did."""

    #: As many jobs as a batch may hold.
    FULL = "full"
    #: The window is over: the oldest has waited as long as it may.
    WINDOW = "window"
    #: The window is over, and each goes by itself (`policies.FixedOrSingle`).
    SINGLE = "single"
    #: All clients have their request in already; nobody else could join.
    NO_MORE_CLIENTS = "no_more_clients"
    #: A worker was idle and waiting would not have paid.
    WORK_CONSERVING = "work_conserving"
    #: Held until it was as large as the load calls for.
    TARGET = "target"
    #: Held as long as holding could pay, and not filled.
    HOLD_EXPIRED = "hold_expired"
    #: A question about the model, or a request whose worker had died: they run alone.
    ALONE = "alone"
    #: A part of a batch that failed.
    ISOLATION = "isolation"
    #: A part of a batch that needed more memory than there is.
    OUT_OF_MEMORY = "out_of_memory"


class Batch:
    """Jobs that a worker runs together, in order.

    Args:
        jobs: At least one.
        closed: Moment the batch was closed, seconds on the monotonic clock.
        reason: Why it was.
        run_as: Rows that the worker is to run, for models of fixed shapes; as many as jobs, or
            more, and then the rest is padding.
        predicted: Seconds it is expected to take; 0 where that is not known.
        held: Seconds for which it was kept although a worker was idle.
    """

    __slots__ = ("closed", "held", "jobs", "predicted", "reason", "run_as")

    def __init__(
        self,
        jobs: Sequence[Job],
        closed: float,
        reason: Reason = Reason.WORK_CONSERVING,
        run_as: int = 0,
        predicted: float = 0.0,
        held: float = 0.0,
    ) -> None:
        self.jobs = jobs
        self.closed = closed
        self.reason = reason
        self.run_as = run_as or len(jobs)
        self.predicted = predicted
        self.held = held

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def waited(self) -> float:
        """Seconds that the oldest had waited when it was closed; not always the first in order."""
        return self.closed - min(map(_arrival_of, self.jobs))

    @property
    def inputs(self) -> list[Input]:
        """What the worker gets."""
        return [job.input for job in self.jobs]

    def deliver(self, predictions: Sequence[Prediction]) -> None:
        """Answer each job with its prediction; as many predictions as jobs."""
        for job, prediction in zip(self.jobs, predictions, strict=True):
            job.resolve(prediction)

    def push(self, places: Sequence[int], pieces: Sequence[Prediction]) -> None:
        """Give the jobs at these places a piece of their answer."""
        for place, piece in zip(places, pieces, strict=True):
            self.jobs[place].push(piece)

    def fail(self, error: ServeError) -> None:
        """Answer every job with the same failure."""
        for job in self.jobs:
            job.fail(error)


class BatchRecord(NamedTuple):
    """What became of a batch; times in seconds, ``closed`` on the monotonic clock.

    Attributes:
        closed: When it left.
        size: Its jobs.
        run_as: Rows that were run.
        reason: Why it left then.
        waited: What the oldest had waited.
        held: For how long it was kept although a worker was idle.
        predicted: What it was expected to take; 0 where that was not known.
        seconds: What it took, from its leaving to its answer.
        succeeded: Whether it was answered, rather than failed as a whole.
    """

    closed: float
    size: int
    run_as: int
    reason: Reason
    waited: float
    held: float
    predicted: float
    seconds: float
    succeeded: bool


class History:
    """The last batches of a model version.

    Args:
        clock: The monotonic one of the records.
        wall_clock: Tells the seconds since the epoch.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        #: The fields of `BatchRecord`; made one when it is looked at, for that costs more.
        self._records: deque[tuple[Any, ...]] = deque(maxlen=_MAX_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, batch: Batch, seconds: float, *, succeeded: bool) -> None:
        """Note what became of a batch, and how long it took."""
        self._records.append(
            (
                batch.closed,
                len(batch.jobs),
                batch.run_as,
                batch.reason,
                batch.waited,
                batch.held,
                batch.predicted,
                seconds,
                succeeded,
            )
        )

    def as_documents(self) -> list[dict[str, Any]]:
        """The batches as JSON objects, the newest last; times in milliseconds."""
        epoch = self._wall_clock() - self._clock()
        return [
            {
                "closedAt": round((epoch + record.closed) * 1000),
                "size": record.size,
                "ranAs": record.run_as,
                "reason": record.reason.value,
                "oldestWaitedMs": _ms(record.waited),
                "heldMs": _ms(record.held),
                "predictedMs": _ms(record.predicted) if record.predicted else None,
                "tookMs": _ms(record.seconds),
                "succeeded": record.succeeded,
            }
            for record in map(BatchRecord._make, self._records)
        ]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
