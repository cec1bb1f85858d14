"""The sequences of a stateful model: which worker serves each, and the order of its jobs.

    job ──► sequence (a queue) ──► slot of a worker ──► the worker's batcher ──► batch

Each worker has a number of slots, and its own batcher. The first request of a sequence takes a slot
of the worker with the fewest sequences, or waits for one. Only the current job of a sequence is in
the batcher; the next one follows when it is answered. So a batch contains at most one job of a
sequence, order is kept, and batches are filled from many sequences, by the usual policies.

With continuous batching the next job follows after the *first piece* of the answer: a request such
as "stop talking" must reach the handler while the answer is streamed.

The clock is passed in, and the owner calls `SequenceTable.expire` when the table asks for it.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

from marserve.frontend.batching.deadlines import Clock
from marserve.frontend.batching.sequences.stateful_sequence import (
    MADE_HERE,
    LostSequences,
    Reason,
    SequenceJob,
    SequenceLimits,
    SequencesFull,
    Slots,
    StatefulSequence,
)
from marserve.frontend.errors import NoWorker, Overloaded, SequenceOver, ServeError

_STOPPED = "Its worker is being stopped."
#: After these ends a request without a mark starts the sequence again.
_RESTARTABLE = (Reason.END, Reason.IDLE, Reason.CLIENT_GONE)


class SequenceTable:
    """The sequences of one model version.

    ``wake_at`` is called with the moment of the next `expire`; it replaces the previous moment.
    ``on_end`` is called with the reason when a sequence has ended.
    """

    def __init__(
        self,
        limits: SequenceLimits,
        clock: Clock,
        wake_at: Callable[[float], object],
        on_end: Callable[[str], object],
    ) -> None:
        self.slots_per_worker = limits.max_sequences
        self.limits = limits
        self.workers: list[Slots] = []
        self.ended: Counter[Reason] = Counter()
        self._clock = clock
        self._wake_at = wake_at
        self._wakes_at = math.inf
        self._on_end = on_end
        #: All sequences; the oldest first.
        self._by_id: dict[str, StatefulSequence] = {}
        #: Sequences without jobs, and since when; the longest idle first.
        self._idle: dict[StatefulSequence, float] = {}
        #: Sequences without a slot, and since when; the longest waiting first.
        self._waiting: dict[StatefulSequence, float] = {}
        self._lost = LostSequences(clock)

    @property
    def open(self) -> int:
        """The number of sequences that have a slot."""
        return len(self._by_id) - len(self._waiting)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a slot."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """The number of jobs that wait behind others of their sequence, or for a slot."""
        return sum(len(sequence.queue) for sequence in self._by_id.values())

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._by_id

    def put(self, sequence_id: str, job: SequenceJob) -> None:
        """Accept the next job of a sequence; the first one opens it.

        Raises:
            SequencesFull: A limit is reached.
            SequenceOver: The sequence has ended, and the job does not start it again.
        """
        sequence = self._by_id.get(sequence_id)
        if sequence is None:
            sequence = self._open(sequence_id, job)
        elif len(sequence.queue) >= self.limits.max_queue:
            raise SequencesFull(
                f"{len(sequence.queue)} requests of the sequence wait, as many as "
                "maxSequenceJobQueueSize allows."
            )
        elif (
            sequence.slots is not None
            and sequence.slots.is_closing
            and not any(each.starts for each in (*sequence.queue, job))
        ):
            raise SequenceOver(sequence_id, _STOPPED)
        job.sequence = sequence
        sequence.queue.append(job)
        sequence.client_left = False
        self._idle.pop(sequence, None)
        if sequence.slots is None:
            self._assign()
        else:
            self._advance(sequence)

    def started(self, job: SequenceJob) -> None:
        """Let the next job of its sequence follow, although this one continues."""
        sequence = job.sequence
        if sequence.current is job:
            sequence.current = None
            sequence.has_started = True
            sequence.is_id_known = sequence.is_id_known or job.is_answered
            self._proceed(sequence)

    def finished(self, job: SequenceJob, *, failed: bool = False) -> None:
        """Note that the worker has answered a job; does nothing the second time."""
        if job in job.sequence.running:
            job.sequence.finish(job, failed=failed)
            self._proceed(job.sequence)

    def discard(self, job: SequenceJob) -> None:
        """Remove a job that was not sent to a worker; does nothing if it is not here."""
        sequence = job.sequence
        if job in sequence.running:
            sequence.take_back(job)
        elif job in sequence.queue:
            sequence.queue.remove(job)
        else:
            return
        sequence.client_left = job.has_left
        self._proceed(sequence)

    def end(self, sequence_id: str, reason: Reason, slots: Slots | None = None) -> bool:
        """End a sequence when its running jobs are answered; with ``slots``, only one of theirs.

        Return whether there is such a sequence.
        """
        sequence = self._by_id.get(sequence_id)
        if sequence is None or (slots is not None and sequence.slots is not slots):
            return False
        self._end(sequence, sequence.ending or reason)
        return True

    def leave(self, sequence_id: str) -> None:
        """End a sequence whose client has left for good; a client that returns gets an error.

        For transports that detect it: over HTTP each request may have its own connection.
        """
        if sequence_id in self._by_id:
            self._by_id[sequence_id].error = "The call of its client was broken off."
            self.end(sequence_id, Reason.CLIENT_GONE)

    def fail_queued(self, error: ServeError) -> None:
        """Fail all jobs that were not sent to a worker."""
        for sequence in list(self._by_id.values()):
            sequence.recall()
            sequence.fail_queued(error)
            self._proceed(sequence)

    # Workers

    def resize(self, slots_per_worker: int) -> None:
        """Change how many sequences a worker may have; those that have a slot keep it."""
        self.slots_per_worker = slots_per_worker
        self._assign()

    def add(self, slots: Slots) -> None:
        """Add the slots of a worker that is ready."""
        self.workers.append(slots)
        self._assign()

    def close(self, slots: Slots) -> None:
        """Accept no further requests for a worker; it is stopped when all others are answered."""
        slots.is_closing = True
        for sequence in list(slots.open):
            self._proceed(sequence)
        if not slots.open:
            slots.on_closed()

    def lose(self, slots: Slots, cause: str, reason: Reason = Reason.WORKER_DIED) -> None:
        """Remove a worker that has ended, and its sequences; safe to call twice.

        The caller fails the jobs that were sent to the worker.
        """
        if slots in self.workers:
            self.workers.remove(slots)
        for sequence in list(slots.open):
            sequence.recall()
            del slots.open[sequence]
            sequence.slots = None
            if sequence.is_new and sequence.queue:  # nothing is lost
                self._wait(sequence)
                continue
            sequence.running.clear()
            self._remember(sequence.id, cause)
            self._remove(sequence, reason)
            self._replace(sequence, reason, cause)
        self._assign()

    # Time

    def expire(self) -> None:
        """End the sequences that are idle, open, or waiting for too long."""
        now, limits = self._clock(), self.limits
        self._wakes_at = math.inf
        for sequence in _due(self._idle.items(), now - limits.max_idle):
            self._end(sequence, Reason.CLIENT_GONE if sequence.client_left else Reason.IDLE)
        for sequence in _due(self._waiting.items(), now - limits.max_wait):
            self._remove(sequence, Reason.NO_SLOT)
            sequence.fail_queued(NoWorker(f'No slot was free for sequence "{sequence.id}".'))
        for sequence in _due(self._ages(), now - limits.max_age):
            self._end(sequence, Reason.TIMEOUT)
        self._wake_by(next(iter(self._idle.values()), math.inf) + limits.max_idle)
        self._wake_by(next(iter(self._waiting.values()), math.inf) + limits.max_wait)
        self._wake_by(next(self._ages(), (None, math.inf))[1] + limits.max_age)

    def _ages(self) -> Iterator[tuple[StatefulSequence, float]]:
        """Yield the sequences that can become too old, and when they were opened."""
        for sequence in self._by_id.values() if self.limits.max_age < math.inf else ():
            if sequence.ending is None and sequence.slots is not None:
                yield sequence, sequence.opened

    def _wake_by(self, due: float) -> None:
        """Request a call of `expire` at this moment, unless an earlier one is requested."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._wake_at(due)

    # The states of a sequence

    def _open(self, sequence_id: str, job: SequenceJob) -> StatefulSequence:
        if not job.starts:
            if reason := self._lost.reason(sequence_id):
                raise SequenceOver(sequence_id, reason)
            if sequence_id.startswith(MADE_HERE):
                raise SequenceOver(sequence_id, "It was ended, or was idle, or open for too long.")
        if len(self._by_id) >= self.limits.max_sequences:
            raise SequencesFull(
                f"The model has {len(self._by_id)} sequences, as many as maxNumSequence allows."
            )
        self._lost.forget(sequence_id)
        sequence = self._by_id[sequence_id] = StatefulSequence(sequence_id, self._clock())
        self._wait(sequence)
        return sequence

    def _wait(self, sequence: StatefulSequence) -> None:
        self._waiting[sequence] = now = self._clock()
        self._wake_by(now + self.limits.max_wait)

    def _assign(self) -> None:
        """Give free slots to waiting sequences."""
        while self._waiting:
            free = [
                each
                for each in self.workers
                if each.is_accepting and len(each.open) < self.slots_per_worker
            ]
            if not free:
                break
            sequence = next(iter(self._waiting))
            del self._waiting[sequence]
            self._attach(sequence, min(free, key=lambda each: len(each.open)))

    def _attach(self, sequence: StatefulSequence, slots: Slots) -> None:
        sequence.slots = slots
        slots.open[sequence] = None
        self._wake_by(sequence.opened + self.limits.max_age)
        self._proceed(sequence)

    def _proceed(self, sequence: StatefulSequence) -> None:
        """Take the next step in a sequence, after a change in it."""
        if sequence.slots is None:
            if not sequence.queue and sequence in self._waiting:
                self._remove(sequence, None)
        elif sequence.ending is None:
            self._advance(sequence)
        elif not sequence.running:
            self._close(sequence)

    def _advance(self, sequence: StatefulSequence) -> None:
        """Put the next job into the batcher, if it may follow."""
        slots = sequence.slots
        if slots is None or sequence.current is not None or sequence.ending is not None:
            return
        while sequence.queue:
            job = sequence.queue[0]
            if job.starts and not sequence.is_new:
                self._end(sequence, Reason.END)  # `_replace` continues with the job
                return
            sequence.queue.popleft()
            if self._run(sequence, slots, job):
                return
        if sequence.running:
            return
        if sequence.is_new:
            self._close(sequence)
        elif slots.is_closing:
            sequence.error = _STOPPED
            self._end(sequence, Reason.WORKER_STOPPED)
        else:
            self._idle[sequence] = now = self._clock()
            self._wake_by(now + self.limits.max_idle)

    def _run(self, sequence: StatefulSequence, slots: Slots, job: SequenceJob) -> bool:
        if not sequence.has_started:
            job.begin_sequence()
        sequence.current = job
        sequence.running.add(job)
        try:
            slots.put(job)
        except Overloaded as error:
            sequence.stop_running(job)
            job.fail(error)
            return False
        return True

    def _end(self, sequence: StatefulSequence, reason: Reason) -> None:
        """End a sequence, when no job of it is running."""
        sequence.ending = reason
        if not sequence.running:
            self._close(sequence)

    def _close(self, sequence: StatefulSequence) -> None:
        """Remove a sequence of which no job is running, and give its slot to another."""
        slots, reason, error = sequence.slots, sequence.ending, sequence.error
        if not sequence.is_new:
            if slots is not None and reason is not None:
                slots.end_sequence(sequence.id, reason)
            if error:
                self._remember(sequence.id, error)
        self._remove(sequence, None if sequence.is_new else reason)
        self._replace(sequence, reason or Reason.END, error)
        self._assign()
        if slots is not None and slots.is_closing and not slots.open:
            slots.on_closed()

    def _remove(self, sequence: StatefulSequence, reason: Reason | None) -> None:
        """Remove a sequence; it is counted if it has a reason."""
        del self._by_id[sequence.id]
        self._idle.pop(sequence, None)
        self._waiting.pop(sequence, None)
        if sequence.slots is not None:
            sequence.slots.open.pop(sequence, None)
        if reason is not None:
            self.ended[reason] += 1
            self._on_end(reason.value)

    def _replace(self, old: StatefulSequence, reason: Reason, error: str) -> None:
        """Start the sequence again with the first waiting job that may; fail those before it."""
        may_start = reason in _RESTARTABLE and not error and not old.is_made_here
        jobs, old.queue = old.queue, deque()
        while jobs and not may_start and not jobs[0].starts:
            jobs.popleft().fail(
                SequenceOver(old.id, error or "It was ended, or open for too long.")
            )
        if not jobs:
            return
        self._lost.forget(old.id)
        new = self._by_id[old.id] = StatefulSequence(old.id, self._clock(), queue=jobs)
        for job in jobs:
            job.sequence = new
        if old.slots is not None and old.slots.is_accepting:  # the slot that has just become free
            self._attach(new, old.slots)
        else:
            self._wait(new)

    def _remember(self, sequence_id: str, error: str) -> None:
        self._lost.add(sequence_id, error, self.limits.max_idle, self.limits.max_sequences)


def _due(moments: Iterable[tuple[StatefulSequence, float]], until: float) -> list[StatefulSequence]:
    """Return the sequences up to a moment, of pairs with rising moments."""
    return [sequence for sequence, _ in takewhile(lambda pair: pair[1] <= until, moments)]
