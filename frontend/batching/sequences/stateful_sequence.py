"""A sequence of a stateful model, and what its table sees of jobs and workers.

The rules that they follow are in `sequence_table`.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from marserve.frontend.errors import ServeError

#: What the ids begin with that the server makes for requests without one.
MADE_HERE = "ts-seq-"


class Reason(Enum):
    """Why a sequence is over; all but the last two are told to its handler."""

    END = "end"  # a request, or the handler, has said so
    IDLE = "idle"  # no request came for `SequenceLimits.max_idle`
    TIMEOUT = "timeout"  # it is older than `SequenceLimits.max_age`
    CLIENT_GONE = "client_gone"  # nobody is left who could go on with it
    WORKER_STOPPED = "worker_stopped"  # scaled down, unregistered, or the server stops
    WORKER_DIED = "worker_died"
    NO_SLOT = "no_slot"  # none was free for `SequenceLimits.max_wait`


class NoRoom(Exception):
    """There are as many sequences, or jobs waiting in this one, as may be."""


@dataclass(frozen=True)
class SequenceLimits:
    """Times in seconds; infinite for none.

    Attributes:
        max_idle: How long a sequence is kept without a request.
        max_age: How long it may take in all.
        max_wait: How long it may wait for a slot.
        max_sequences: How many there may be, waiting ones included.
        max_queue: How many jobs of one sequence may wait, beside the one whose turn it is.
    """

    max_idle: float
    max_age: float = math.inf
    max_wait: float = math.inf
    max_sequences: int = 1
    max_queue: int = 1


class SequenceJob(Protocol):
    """A job of a sequence, as the table sees it.

    Attributes:
        sequence: The sequence it belongs to; set by the table.
        starts: Whether its client asks for a new sequence.
        ends: Whether it is the last one of its sequence.
        dispatched: See `Job.dispatched`.
        is_answered: Whether its client has got an answer, and with it the id of the sequence.
        has_left: Whether its client has left without waiting for the answer.
    """

    sequence: "StatefulSequence"
    starts: bool
    ends: bool
    dispatched: float | None
    is_answered: bool
    has_left: bool

    def begin_sequence(self) -> None:
        """Tell the handler that it is the first of its sequence."""

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""


class Slots(Protocol):
    """The slots of one worker, and its batcher.

    Attributes:
        open: The sequences that have its slots, in the order in which they came.
        is_closing: Whether it is to be stopped when they are over.
    """

    open: "dict[StatefulSequence, None]"
    is_closing: bool

    @property
    def is_accepting(self) -> bool:
        """Whether it may get further sequences."""

    def put(self, job: SequenceJob) -> None:
        """Put a job into the batcher; raises Overloaded if it could not be answered in time."""

    def discard(self, job: SequenceJob) -> None:
        """Take a job out of the batcher again."""

    def end_sequence(self, sequence_id: str, reason: Reason) -> None:
        """Tell the handler that a sequence is over."""

    def on_closed(self) -> None:
        """Called once no sequence is left of a worker that is closing."""


@dataclass(eq=False, slots=True)
class StatefulSequence:
    """A sequence that has a slot, or waits for one.

    Attributes:
        queue: Jobs behind the one whose turn it is.
        turn: The job whose turn it is, until it is answered; None if there is none.
        running: The jobs that are in the batcher or in the worker.
        opener: The job that begins it, as far as the handler knows, until it is answered.
        is_begun: Whether the opener was answered, not failed: then the handler may not have come to
            it, and the next job begins the sequence.
        is_seen: Whether a job of it has come back from the worker.
        ending: Why it is over as soon as no job of it is running; None while it goes on.
        why: What its clients are told then, if they are to be told; else empty.
        client_left: Whether the client of its latest job left before the answer.
    """

    id: str
    opened: float
    slots: Slots | None = None
    queue: deque[SequenceJob] = field(default_factory=deque)
    turn: SequenceJob | None = None
    running: set[SequenceJob] = field(default_factory=set)
    opener: SequenceJob | None = None
    is_begun: bool = False
    is_seen: bool = False
    ending: Reason | None = None
    why: str = ""
    client_left: bool = False

    @property
    def is_made_here(self) -> bool:
        """Whether the server made its id."""
        return self.id.startswith(MADE_HERE)

    @property
    def is_new(self) -> bool:
        """Whether the handler has not seen it yet."""
        return not self.is_seen and all(job.dispatched is None for job in self.running)

    @property
    def has_jobs(self) -> bool:
        """Whether any job of it is not answered yet."""
        return bool(self.queue or self.running)
