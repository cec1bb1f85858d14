"""Batches, and a history of the last of them for operators (`GET /models/{model}/batches`)."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple

from marserve.backend.protocol import Input, Piece, Prediction, Reply
from marserve.frontend.batching.jobs import Job
from marserve.frontend.errors import PredictionFailed, ServeError

_MAX_RECORDS = 512

#: The values of a document in the order of `History.as_documents`; a tuple is the fastest to make.
_Record = tuple[float, int, int, "Reason", float, float, float, float, bool, "Lengths | None"]
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


@dataclass(slots=True, eq=False)
class Batch:
    """Jobs that a worker runs together, in order; at least one."""

    jobs: Sequence[Job]
    closed: float
    reason: Reason = Reason.WORK_CONSERVING
    run_as: int = 0  # rows that the worker runs; those beyond the jobs are padding
    predicted: float = 0.0  # expected seconds in the worker; 0 if unknown
    held: float = 0.0  # seconds for which it was held although a worker was idle
    lengths: "Lengths | None" = field(default=None, init=False)  # if it was formed by them
    _waited: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.run_as = self.run_as or len(self.jobs)

    def __len__(self) -> int:
        return len(self.jobs)

    @property
    def waited(self) -> float:
        """Seconds that the oldest job, which may not be the first, had waited at closing."""
        if self._waited is None:
            self._waited = self.closed - min(map(_arrival_of, self.jobs))
        return self._waited

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

    def push(self, piece: Piece) -> None:
        """Pass the predictions of a piece to their jobs; a failure goes to all jobs."""
        if piece.code != 200:
            self.fail(failure_of(piece))
        else:
            for place, prediction in zip(piece.places, piece.predictions, strict=True):
                self.jobs[place].push(prediction)

    def fail(self, error: ServeError) -> None:
        """Answer every job with the same failure."""
        for job in self.jobs:
            job.fail(error)


def failure_of(reply: Reply | Piece) -> ServeError:
    """Return the error that clients get for a failure."""
    return PredictionFailed(reply.message, status=reply.code)


class History:
    """The last batches of a model version; ``clock`` is the one of `Batch.closed`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: Not the batches, which hold what clients sent.
        self._records: deque[_Record] = deque(maxlen=_MAX_RECORDS)

    def __len__(self) -> int:
        return len(self._records)

    def add(self, batch: Batch, seconds: float, *, succeeded: bool) -> None:
        """Record a finished batch."""
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
                batch.lengths,
            )
        )

    @property
    def last_closed_ms(self) -> int:
        """When the last batch was closed, in milliseconds since the epoch; 0 for none."""
        if not self._records:
            return 0
        closed, *_ = self._records[-1]
        return round((time.time() - self._clock() + closed) * 1000)

    def as_documents(self) -> list[dict[str, Any]]:
        """Return the batches as JSON objects, the newest last; times in milliseconds."""
        epoch = time.time() - self._clock()
        return [
            {
                "closedAt": round((epoch + closed) * 1000),
                "size": size,
                "ranAs": rows,
                "reason": reason.value,
                "oldestWaitedMs": _ms(waited),
                "heldMs": _ms(held),
                "predictedMs": _ms(predicted) if predicted else None,
                "tookMs": _ms(seconds),
                "succeeded": good,
                **(lengths.as_members() if lengths else {}),
            }
            for (
                closed,
                size,
                rows,
                reason,
                waited,
                held,
                predicted,
                seconds,
                good,
                lengths,
            ) in self._records
        ]


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
