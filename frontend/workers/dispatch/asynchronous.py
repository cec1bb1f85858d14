"""Asynchronous handlers: every request is sent by itself as soon as it comes.

So many may be under way in a worker; the others wait in the queue, which refuses more than it has
room for. Requests by themselves are no batches, and stand in no history of them.

A request whose worker died is in quarantine at first: until it is answered, or has run for a
moment, no other joins it. If its new worker dies meanwhile, it is to blame, and those that were
there before it have another try, their last.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from marserve.backend.protocol import Reply
from marserve.frontend.batching.batches import Batch, failure_of
from marserve.frontend.batching.jobs import Job
from marserve.frontend.workers.dispatch.batched import DispatchStrategy, InFlight

#: Requests under way in a worker where nobody says how many: more than any engine runs at a time,
#: and little enough for memory.
MAX_IN_FLIGHT = 1000
# How long a request whose worker died has the next one to itself. What crashes a process mostly
# does so at once; and others must not wait for the end of an answer that takes minutes.
_QUARANTINE_SECONDS = 1.0


@dataclass(eq=False)
class Async(DispatchStrategy):
    """See the module; from ``limit`` requests under way on it asks for no more."""

    limit: int = MAX_IN_FLIGHT
    #: In the order in which they came; only the keys count.
    _in_flight: dict[Job, None] = field(default_factory=dict, init=False)
    #: The latest, until another is asked for.
    _latest: Batch | None = field(default=None, init=False)
    _quarantined: Job | None = field(default=None, init=False)

    def run(self, batch: Batch) -> None:
        """See `BatchRunner.run`."""
        self._latest = batch
        for job in batch.jobs:
            self._in_flight[job] = None
            self._send([job.input], partial(self._on_reply, Batch([job], batch.closed)))
        if batch.jobs[0].crashes:
            self._quarantined = job = batch.jobs[0]
            self._loop.call_later(_QUARANTINE_SECONDS, self._end_quarantine, job)
        else:
            # Later: at once, a long queue would be worked off in ever deeper calls.
            self._loop.call_soon(self._ask_for_more)

    def _end_quarantine(self, job: Job) -> None:
        """End the quarantine of a job, if it is not over yet."""
        if job is self._quarantined:
            self._quarantined = None
            self._ask_for_more()

    def _ask_for_more(self) -> None:
        """Ask for another request, if there is room for it and nobody has asked yet."""
        if self._latest and not self._quarantined and len(self._in_flight) < self.limit:
            latest, self._latest = self._latest, None
            self._ask(latest)

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.more:
            batch.push(reply)
            return
        (job,) = batch.jobs
        del self._in_flight[job]
        if reply.code == 200:
            queued, took = batch.closed - job.arrived, time.monotonic() - batch.closed
            self.metrics.batch_done(batch.ids, 1, queued, took, reply)
            batch.deliver(reply.predictions)
        else:
            batch.fail(failure_of(reply))
            self.metrics.batch_failed()
        self._end_quarantine(job)
        self._ask_for_more()
        self._note_drained()

    def _batches_in_flight(self) -> Iterable[Batch]:
        return (self._latest,) if self._latest is not None else ()

    def _take_in_flight(self) -> InFlight:
        jobs, self._in_flight = list(self._in_flight), {}
        quarantined, self._quarantined = self._quarantined, None
        if quarantined is None:
            return jobs, ()
        return [quarantined], [job for job in jobs if job is not quarantined]
