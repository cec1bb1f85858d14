"""A sequence of a stateful model, and the interfaces of its jobs and workers."""

import math
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from marserve.frontend.errors import ServeError

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
    """Limits of a model's sequences; times in seconds, infinite for none.

    Attributes:
        max_idle: Time for which a sequence is kept without a request.
        max_age: Time from its start to its end.
        max_wait: Time for which it waits for a slot.
        max_sequences: Number of sequences, waiting ones included.
        max_queue: Number of jobs of a sequence that wait behind its current one.
    """

    max_idle: float
    max_age: float = math.inf
    max_wait: float = math.inf
    max_sequences: int = 1
    max_queue: int = 1


class SequenceJob(Protocol):
    """A job of a sequence.

    Attributes:
        starts: Whether its client asks for a new sequence.
        ends: Whether it is the last one of its sequence.
        is_answered: Whether its client has received an answer, and with it the sequence's id.
        has_left: Whether its client has left before the answer.
    """

    sequence: "StatefulSequence"
    starts: bool
    ends: bool
    dispatched: float | None
    is_answered: bool
    has_left: bool

    def begin_sequence(self) -> None:
        """Mark the input as the first of its sequence."""

    def fail(self, error: ServeError) -> None:
        """Answer with a failure."""


class Slots(Protocol):
    """The slots of one worker, and its batcher.

    Attributes:
        open: The sequences that have a slot, in order of arrival.
        is_closing: Whether the worker stops when they have ended.
    """

    open: "dict[StatefulSequence, None]"
    is_closing: bool

    @property
    def is_accepting(self) -> bool:
        """Whether further sequences are accepted."""

    def put(self, job: SequenceJob) -> None:
        """Put a job into the batcher; raises Overloaded if it could not be answered in time."""

    def discard(self, job: SequenceJob) -> None:
        """Remove a job from the batcher."""

    def end_sequence(self, sequence_id: str, reason: Reason) -> None:
        """Send the end of a sequence to the handler."""

    def on_closed(self) -> None:
        """Stop the worker: it is closing, and its last sequence has ended."""


@dataclass(eq=False, slots=True)
class StatefulSequence:
    """A sequence that has a slot, or waits for one.

    Attributes:
        queue: Jobs behind the current one.
        current: The job that the next one waits for; None if there is none.
        running: The jobs that are in the batcher or at the worker.
        has_started: Whether a job of it has succeeded. Until then each job is marked as the first,
            because the handler may not have processed one that failed.
        is_seen: Whether a job of it has returned from the worker.
        is_id_known: Whether a client has received its id.
        ending: Why it ends when no job of it is running; None while it continues.
        error: Message for clients that return after its end; empty if they may start it again.
        client_left: Whether the client of its latest job left before the answer.
    """

    id: str
    opened: float
    slots: Slots | None = None
    queue: deque[SequenceJob] = field(default_factory=deque)
    current: SequenceJob | None = None
    running: set[SequenceJob] = field(default_factory=set)
    has_started: bool = False
    is_seen: bool = False
    is_id_known: bool = False
    ending: Reason | None = None
    error: str = ""
    client_left: bool = False

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
