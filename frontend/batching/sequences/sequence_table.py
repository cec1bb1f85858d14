"""The sequences of a stateful model: which worker has which, and what is its turn next.

A stateful model keeps something between requests (a conversation, a tracked object), so that all
requests of a sequence must reach the same worker, in their order::

    job ──► sequence (a queue) ──► slot of a worker ──► the worker's batcher ──► batch

Each worker has a number of slots, and a batcher of its own. A sequence takes a slot when its first
request comes, from the worker with the fewest sequences, and waits for one if there is none. Only
the first job of each sequence is put into the batcher; the next one when that is answered. So at
most one job of a sequence is in a batch, order is kept, and batches are filled across sequences,
by the policies that other models have.

With continuous batching the next job follows when the *first piece* of the answer has come: a
request like "stop talking" must reach the handler while the answer is streamed.

Pure: the clock is passed in, and `SequenceTable.expire` is to be called when it asks for it.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from marserve.frontend.batching.deadlines import Clock
from marserve.frontend.batching.sequences.lost_sequences import LostSequences
from marserve.frontend.batching.sequences.stateful_sequence import (
    MADE_HERE,
    NoRoom,
    Reason,
    SequenceJob,
    SequenceLimits,
    Slots,
    StatefulSequence,
)
from marserve.frontend.errors import NoWorker, Overloaded, SequenceOver, ServeError

_STOPPED = "Its worker is being stopped."
#: After these a request without a mark begins the sequence anew: nothing is lost by surprise.
_MAY_BEGIN_ANEW = (Reason.END, Reason.IDLE, Reason.CLIENT_GONE)


class SequenceTable:
    """The sequences of one model version.

    Args:
        limits: Of their times and numbers.
        clock: Seconds; that of the jobs.
        wake_at: Is called with a moment at which `expire` is to be called; it replaces the last.
        on_end: Is called when a sequence is over.

    Attributes:
        limits: Of their times and numbers; may be replaced.
        slots_per_worker: How many sequences a worker may have.
        ended: How many are over, by the reason.
    """

    def __init__(
        self,
        limits: SequenceLimits,
        clock: Clock,
        wake_at: Callable[[float], object],
        on_end: Callable[[Reason], object],
    ) -> None:
        self.slots_per_worker = limits.max_sequences
        self.limits = limits
        self._clock = clock
        self._wake_at = wake_at
        self._wakes_at = math.inf
        self._on_end = on_end
        self.ended: Counter[Reason] = Counter()
        #: All of them; the oldest first.
        self._by_id: dict[str, StatefulSequence] = {}
        #: Those without jobs, and since when; the one that is idle for longest first.
        self._idle: dict[StatefulSequence, float] = {}
        #: Those without a slot, and since when; the one that has waited longest first.
        self._waiting: dict[StatefulSequence, float] = {}
        self._workers: list[Slots] = []
        self._lost = LostSequences(clock)

    # -- looking -----------------------------------------------------------------------------------

    @property
    def workers(self) -> list[Slots]:
        """The workers that have slots, in the order in which they came."""
        return self._workers

    @property
    def open(self) -> int:
        """How many sequences have a slot."""
        return len(self._by_id) - len(self._waiting)

    @property
    def waiting(self) -> int:
        """How many sequences wait for a slot."""
        return len(self._waiting)

    @property
    def queued(self) -> int:
        """How many jobs wait behind others of their sequence, or for a slot."""
        return sum(len(sequence.queue) for sequence in self._by_id.values())

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._by_id

    # -- jobs --------------------------------------------------------------------------------------

    def put(self, sequence_id: str, job: SequenceJob) -> None:
        """Accept the next job of a sequence; the first one opens it.

        Raises:
            NoRoom: There are too many.
            SequenceOver: The sequence is over, and the job does not begin a new one.
        """
        sequence = self._by_id.get(sequence_id)
        if sequence is None:
            sequence = self._open(sequence_id, job)
        elif len(sequence.queue) >= self.limits.max_queue:
            raise NoRoom
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

    def begun(self, job: SequenceJob) -> None:
        """Let the next job of its sequence follow, though this one goes on."""
        sequence = job.sequence
        if sequence.turn is job:
            sequence.turn = None
            sequence.is_begun = True
            self._go_on(sequence)

    def finished(self, job: SequenceJob, *, failed: bool = False) -> None:
        """Note that the worker has answered a job; does nothing the second time."""
        sequence = job.sequence
        if job not in sequence.running:
            return
        sequence.running.discard(job)
        sequence.is_seen = True
        sequence.is_begun = sequence.is_begun or not failed
        if sequence.turn is job:
            sequence.turn = None
        sequence.client_left = job.has_left
        if job.ends:
            sequence.ending = sequence.ending or Reason.END
        elif sequence.is_made_here and job is sequence.opener and not job.is_answered:
            sequence.ending = sequence.ending or Reason.CLIENT_GONE  # nobody knows its id
        if job is sequence.opener:
            sequence.opener = None  # not to hold its body for as long as the sequence
        self._go_on(sequence)

    def discard(self, job: SequenceJob) -> None:
        """Remove a job that was not sent to a worker; does nothing if it is not here."""
        sequence = job.sequence
        if job in sequence.running:
            self._take_back(sequence, job)
        elif job in sequence.queue:
            sequence.queue.remove(job)
        else:
            return
        sequence.client_left = job.has_left
        self._go_on(sequence)

    def end(self, sequence_id: str, reason: Reason, slots: Slots | None = None) -> bool:
        """End a sequence, once what runs of it is answered; with ``slots``, only one of theirs.

        Returns whether there is such a sequence.
        """
        sequence = self._by_id.get(sequence_id)
        if sequence is None or (slots is not None and sequence.slots is not slots):
            return False
        sequence.ending = sequence.ending or reason
        if not sequence.running:
            self._close(sequence)
        return True

    def leave(self, sequence_id: str) -> None:
        """The client of a sequence is gone for good; one that comes back is told that it is over.

        For transports that know: over HTTP each request may have a connection of its own.
        """
        if sequence_id in self._by_id:
            self._by_id[sequence_id].why = "The call of its client was broken off."
            self.end(sequence_id, Reason.CLIENT_GONE)

    def fail_queued(self, error: ServeError) -> None:
        """Fail all jobs that were not sent to a worker."""
        for sequence in list(self._by_id.values()):
            jobs = list(sequence.queue)
            sequence.queue.clear()
            if sequence.turn is not None and sequence.turn.dispatched is None:
                jobs.append(sequence.turn)
                self._take_back(sequence, sequence.turn)
            for job in jobs:
                job.fail(error)
            self._go_on(sequence)

    # -- workers -----------------------------------------------------------------------------------

    def resize(self, slots_per_worker: int) -> None:
        """Change how many sequences a worker may have; those that have a slot keep it."""
        self.slots_per_worker = slots_per_worker
        self._assign()

    def add(self, slots: Slots) -> None:
        """A worker is ready: its slots may be taken."""
        self._workers.append(slots)
        self._assign()

    def close(self, slots: Slots) -> None:
        """Stop a worker when it has answered what was accepted; no further requests are."""
        slots.is_closing = True
        for sequence in list(slots.open):
            self._go_on(sequence)
        if not slots.open:
            slots.on_closed()

    def lose(self, slots: Slots, cause: str, reason: Reason = Reason.WORKER_DIED) -> None:
        """A worker is gone, and the state of its sequences with it; safe to call twice.

        The jobs that it had are failed by the caller.
        """
        if slots in self._workers:
            self._workers.remove(slots)
        for sequence in list(slots.open):
            turn = sequence.turn
            if turn is not None and turn.dispatched is None:
                self._take_back(sequence, turn)
                sequence.queue.appendleft(turn)
            del slots.open[sequence]
            sequence.slots = None
            if sequence.is_new and sequence.queue:  # the handler has not seen it: nothing is lost
                self._wait(sequence)
                continue
            sequence.running.clear()
            self._remember(sequence.id, cause)
            self._remove(sequence, reason)
            self._replace(sequence, reason, cause)
        self._assign()

    # -- time --------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End what is idle for too long, too old, or has waited for too long."""
        now, limits = self._clock(), self.limits
        self._wakes_at = math.inf
        for sequence in _due(self._idle.items(), now - limits.max_idle):
            sequence.ending = Reason.CLIENT_GONE if sequence.client_left else Reason.IDLE
            self._close(sequence)
        for sequence in _due(self._waiting.items(), now - limits.max_wait):
            self._remove(sequence, Reason.NO_SLOT)
            jobs, sequence.queue = sequence.queue, deque()
            for job in jobs:
                job.fail(NoWorker(f'No slot was free for sequence "{sequence.id}".'))
        for sequence in _due(self._ages(), now - limits.max_age):
            sequence.ending = Reason.TIMEOUT
            if not sequence.running:
                self._close(sequence)
        self._wake_by(next(iter(self._idle.values()), math.inf) + limits.max_idle)
        self._wake_by(next(iter(self._waiting.values()), math.inf) + limits.max_wait)
        self._wake_by(next(self._ages(), (None, math.inf))[1] + limits.max_age)

    def _ages(self) -> Iterator[tuple[StatefulSequence, float]]:
        """The sequences whose time is running, and when they were opened, the oldest first."""
        for sequence in self._by_id.values() if self.limits.max_age < math.inf else ():
            if sequence.ending is None and sequence.slots is not None:
                yield sequence, sequence.opened

    def _wake_by(self, due: float) -> None:
        """Ask for a call of `expire` at this moment, unless there will be one before."""
        if due < self._wakes_at:
            self._wakes_at = due
            self._wake_at(due)

    # -- the life of a sequence --------------------------------------------------------------------

    def _open(self, sequence_id: str, job: SequenceJob) -> StatefulSequence:
        if not job.starts:
            if why := self._lost.why(sequence_id):
                raise SequenceOver(sequence_id, why)
            if sequence_id.startswith(MADE_HERE):
                raise SequenceOver(sequence_id, "It was ended, or was idle, or open for too long.")
        if len(self._by_id) >= self.limits.max_sequences:
            raise NoRoom
        self._lost.forget(sequence_id)
        sequence = self._by_id[sequence_id] = StatefulSequence(sequence_id, self._clock())
        self._wait(sequence)
        return sequence

    def _wait(self, sequence: StatefulSequence) -> None:
        self._waiting[sequence] = now = self._clock()
        self._wake_by(now + self.limits.max_wait)

    def _assign(self) -> None:
        while self._waiting:
            free = [
                each
                for each in self._workers
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
        self._go_on(sequence)

    def _go_on(self, sequence: StatefulSequence) -> None:
        """Do what is next in a sequence, after anything has happened in it."""
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
        if slots is None or sequence.turn is not None or sequence.ending is not None:
            return
        while sequence.queue:
            job = sequence.queue[0]
            if job.starts and not sequence.is_new:
                sequence.ending = Reason.END  # and `_replace` goes on with the job
                if not sequence.running:
                    self._close(sequence)
                return
            sequence.queue.popleft()
            if self._put(sequence, slots, job):
                return
        if not sequence.running:
            self._rest(sequence, slots)

    def _put(self, sequence: StatefulSequence, slots: Slots, job: SequenceJob) -> bool:
        if not sequence.is_begun:
            job.begin_sequence()
            sequence.opener = job
        sequence.turn = job
        sequence.running.add(job)
        try:
            slots.put(job)
        except Overloaded as error:
            sequence.running.discard(job)
            sequence.turn = None
            job.fail(error)
            return False
        return True

    def _take_back(self, sequence: StatefulSequence, job: SequenceJob) -> None:
        """Take a job out of the batcher that was not sent to the worker."""
        if sequence.slots is not None:
            sequence.slots.discard(job)
        sequence.running.discard(job)
        if sequence.turn is job:
            sequence.turn = None

    def _rest(self, sequence: StatefulSequence, slots: Slots) -> None:
        """A sequence has no job."""
        if sequence.is_new:
            self._close(sequence)
        elif slots.is_closing:
            sequence.ending, sequence.why = Reason.WORKER_STOPPED, _STOPPED
            self._close(sequence)
        else:
            self._idle[sequence] = now = self._clock()
            self._wake_by(now + self.limits.max_idle)

    def _close(self, sequence: StatefulSequence) -> None:
        """End a sequence of which nothing is running, and give its slot to another."""
        slots, reason, why = sequence.slots, sequence.ending, sequence.why
        if slots is not None and reason is not None and not sequence.is_new:
            slots.end_sequence(sequence.id, reason)
        if why and not sequence.is_new:
            self._remember(sequence.id, why)
        self._remove(sequence, None if sequence.is_new else reason)
        self._replace(sequence, reason or Reason.END, why)
        self._assign()
        if slots is not None and slots.is_closing and not slots.open:
            slots.on_closed()

    def _remove(self, sequence: StatefulSequence, reason: Reason | None) -> None:
        """Forget a sequence; one without a reason is as if it had never been."""
        del self._by_id[sequence.id]
        self._idle.pop(sequence, None)
        self._waiting.pop(sequence, None)
        if sequence.slots is not None:
            sequence.slots.open.pop(sequence, None)
        if reason is not None:
            self.ended[reason] += 1
            self._on_end(reason)

    def _replace(self, old: StatefulSequence, reason: Reason, why: str) -> None:
        """Go on with the jobs behind the end of a sequence, from the first that may begin anew."""
        may_begin = reason in _MAY_BEGIN_ANEW and not why and not old.is_made_here
        jobs, old.queue = old.queue, deque()
        while jobs and not may_begin and not jobs[0].starts:
            jobs.popleft().fail(SequenceOver(old.id, why or "It was ended, or open for too long."))
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

    def _remember(self, sequence_id: str, why: str) -> None:
        self._lost.add(sequence_id, why, self.limits.max_idle, self.limits.max_sequences)


def _due(moments: Iterable[tuple[StatefulSequence, float]], until: float) -> list[StatefulSequence]:
    """Those in front whose moment has come, of sequences by rising moments."""
    due = []
    for sequence, moment in moments:
        if moment > until:
            break
        due.append(sequence)
    return due
