"""A sequence of a stateful model, and the interfaces of its jobs and workers."""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from marserve.frontend.batching.deadlines import Clock
from marserve.frontend.errors import ServeError

# How many lost sequences are remembered, in addition to those that may be open.
_MAX_REMEMBERED = 1000
#: The prefix of ids that the server makes for requests without one.
MADE_HERE = "ts-seq-"


class Reason(Enum):
    """Why a sequence has ended; the handler's hook is called for all but the last two."""

    END = "end"  # marked by a request or by the handler
    IDLE = "idle"  # no request for `SequenceLimits.max_idle`
    TIMEOUT = "timeout"  # older than `SequenceLimits.max_age`
    CLIENT_GONE = "client_gone"  # its client has left
    WORKER_STOPPED = "worker_stopped"  # scaled down, unregistered, or the server stops
    WORKER_DIED = "worker_died"
    NO_SLOT = "no_slot"  # none was free for `SequenceLimits.max_wait`


class SequencesFull(Exception):
    """The limit of sequences, or of waiting jobs in this one, is reached."""


@dataclass(frozen=True)
class SequenceLimits:
    """Limits of a model's sequences; times in seconds, infinite for none."""

    max_idle: float  # for which a sequence is kept without a request
    max_age: float = math.inf  # from its start to its end
    max_wait: float = math.inf  # for a slot
    max_sequences: int = 1  # waiting ones included
    max_queue: int = 1  # jobs of a sequence that wait behind its current one


class SequenceJob(Protocol):
    """A job of a sequence."""

    sequence: "StatefulSequence"
    starts: bool  # whether its client asks for a new sequence
    ends: bool  # whether it is the last one of its sequence
    dispatched: float | None
    is_answered: bool  # whether its client has received an answer, with the sequence's id
    has_left: bool  # whether its client has left before the answer

    def begin_sequence(self) -> None:
        """Mark the input as the first of its sequence."""

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""


class Slots(Protocol):
    """The slots of one worker, and its batcher.

    ``open`` has the sequences with a slot; the worker ``is_closing`` if it stops after their end.
    """

    open: "dict[StatefulSequence, None]"
    is_closing: bool

    @property
    def is_accepting(self) -> bool:
        """Whether further sequences are accepted."""

    def put(self, job: SequenceJob) -> None:
        """Put a job into the batcher; raises Overloaded if too much work is ahead of it."""

    def discard(self, job: SequenceJob) -> None:
        """Remove a job from the batcher."""

    def end_sequence(self, sequence_id: str, reason: Reason) -> None:
        """Send the end of a sequence to the handler."""

    def on_closed(self) -> None:
        """Stop the worker: it is closing, and its last sequence has ended."""


@dataclass(eq=False, slots=True)
class StatefulSequence:
    """A sequence that has a slot, or waits for one."""

    id: str
    opened: float
    slots: Slots | None = None
    queue: deque[SequenceJob] = field(default_factory=deque)  # behind the current one
    current: SequenceJob | None = None  # for which the next one waits
    running: set[SequenceJob] = field(default_factory=set)  # in the batcher or at the worker
    #: Whether a job has succeeded. Until then each job is marked as the first, because the handler
    #: may not have processed one that failed.
    has_started: bool = False
    is_seen: bool = False  # whether a job has returned from the worker
    is_id_known: bool = False  # whether a client has received its id
    ending: Reason | None = None  # why it ends when no job is running; None while it continues
    error: str = ""  # for clients that return after its end; empty if they may start it again
    client_left: bool = False  # whether the client of its latest job left before the answer

    @property
    def is_made_here(self) -> bool:
        """Whether the server made its id."""
        return self.id.startswith(MADE_HERE)

    @property
    def is_new(self) -> bool:
        """Whether no job of it was sent to the worker."""
        return not self.is_seen and all(job.dispatched is None for job in self.running)

    @property
    def has_jobs(self) -> bool:
        """Whether a job of it is not answered yet."""
        return bool(self.queue or self.running)

    def take_back(self, job: SequenceJob) -> None:
        """Remove a job from the batcher that was not sent to the worker."""
        if self.slots is not None:
            self.slots.discard(job)
        self.stop_running(job)

    def recall(self) -> None:
        """Return the current job to the queue, if it was not sent to the worker."""
        job = self.current
        if job is not None and job.dispatched is None:
            self.take_back(job)
            self.queue.appendleft(job)

    def fail_queued(self, error: ServeError) -> None:
        """Fail the jobs behind the current one."""
        jobs, self.queue = self.queue, deque()
        for job in jobs:
            job.fail(error)

    def stop_running(self, job: SequenceJob) -> None:
        """Note that a job is neither in the batcher nor at the worker."""
        self.running.discard(job)
        if self.current is job:
            self.current = None

    def finish(self, job: SequenceJob, *, failed: bool) -> None:
        """Note that the worker has answered a running job."""
        self.stop_running(job)
        self.is_seen = True
        self.has_started = self.has_started or not failed
        self.is_id_known = self.is_id_known or job.is_answered
        self.client_left = job.has_left
        if job.ends:
            self.ending = self.ending or Reason.END
        elif self.is_made_here and not self.is_id_known:
            self.ending = self.ending or Reason.CLIENT_GONE


class LostSequences:
    """The sequences whose state was lost, so that a client that returns receives an error.

    Each is remembered for as long as it would have been kept without a request. So a client that
    never marks a start can use its id again after a while.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: By id: the moment until which it is remembered, and the reason; the oldest first.
        self._lost: dict[str, tuple[float, str]] = {}

    def add(self, sequence_id: str, reason: str, seconds: float, max_open: int) -> None:
        """Remember a sequence for these seconds, beside the ``max_open`` that may be open."""
        now = self._clock()
        self._lost.pop(sequence_id, None)  # to the end of the order
        self._lost[sequence_id] = now + seconds, reason
        limit = max_open + _MAX_REMEMBERED
        while len(self._lost) > limit or next(iter(self._lost.values()))[0] <= now:
            del self._lost[next(iter(self._lost))]

    def reason(self, sequence_id: str) -> str:
        """Return why a sequence was lost; empty if it was not, or is no longer remembered."""
        until, reason = self._lost.get(sequence_id, (0.0, ""))
        return reason if self._clock() < until else ""

    def forget(self, sequence_id: str) -> None:
        """Remove a sequence that is started again."""
        self._lost.pop(sequence_id, None)
