"""Several batches outstanding at one worker, so that it never waits for the next.

A worker whose stages overlap (`backend.pipeline`) has a batch in each of them, and the next one may
lie in its wire. Another finds there what it does next as soon as it is done; that gains little
where the frontend has no core to spare (a no-op on two cores: 0.95 at batch 1, 1.06 at 32).

Each batch has a lane, and a lane serves as `OneAtATime` does: a batch that failed is taken apart
where it was, while the others go on. To the batcher every lane is a worker of its own, that of a
busy worker as good as an idle one's, but that it comes last. So the crew of a policy is as large as
there are batches on their way and places for more; by Little's law the cost that is learnt of a
batch grows with their number alike, and what the policy reckons with, batches per second, stays
true.

Little is sent ahead: whoever has left for a worker can neither be joined by others nor be overtaken
by someone in a hurry. A worker whose stages overlap asks for each batch, and has at most one that
it has not asked behind. (All lanes open at once were simulated under the adaptive policy, with a
model that does not care for the size of its batches: of a latency goal four times as long as its
batches 3 % was kept at half the load, and all of it this way.)

A worker that dies had begun with some of its batches. Whoever else was in its wire hardly had a
part in that. A request that has been in a crash before is on probation: nothing is sent behind it
until it is answered.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from marserve.backend.protocol import STAGES, Reply
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.isolation import RetryBudget
from marserve.frontend.batching.jobs import Job
from marserve.frontend.telemetry.metrics import ModelMetrics
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.serving import OneAtATime, Serving


@dataclass(eq=False)
class SeveralAtATime(Serving):
    """See the module.

    Args:
        budget: What the model may spend on taking failed batches apart.
        count: The most batches outstanding.
    """

    budget: RetryBudget
    count: int
    _free: "deque[_Lane]" = field(init=False)
    #: Those with a batch, in the order in which they were sent, and whether the worker has asked
    #: behind it.
    _busy: "dict[_Lane, bool]" = field(default_factory=dict, init=False)
    #: The one that asks for a batch.
    _asking: "_Lane | None" = field(default=None, init=False)
    #: The one that has a request which was in a crash before.
    _suspect: "_Lane | None" = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._free = deque(_Lane.of(self) for _ in range(self.count))
        #: How many may have been sent that it has not asked behind.
        overlaps = self.connection.overlaps
        self._most_unasked = max(1, self.count - STAGES) if overlaps else self.count

    @property
    def is_busy(self) -> bool:
        """See `Serving.is_busy`."""
        return bool(self._busy)

    @property
    def in_hand(self) -> int:
        """Batches that are outstanding."""
        return len(self._busy)

    def begin(self) -> None:
        """See `Serving.begin`."""
        self.batcher.serve_least_in_hand_first()
        self._ask()

    # Of a lane

    def took(self, lane: "_Lane", batch: Batch) -> None:
        """A lane has sent a batch, or a part of one that failed."""
        self._busy.pop(lane, None)
        self._busy[lane] = False
        if batch.jobs[0].crashes:
            self._suspect = lane
        if lane is self._asking:
            self._asking = None
            # Later: at once, a long queue would be worked off in ever deeper calls.
            self._loop.call_soon(self._ask)

    def asked_behind(self, lane: "_Lane") -> None:
        """The worker could do with another batch behind the one of a lane."""
        if lane in self._busy:
            self._busy[lane] = True
            self._ask()

    def answered(self, lane: "_Lane") -> None:
        """All of a lane's batch is answered."""
        del self._busy[lane]
        self._free.append(lane)
        if lane is self._suspect:
            self._suspect = None
        self.batcher.answered(lane)
        if self._resting:
            self._note_idle()
        else:
            self._ask()

    # Of the worker

    def _ask(self) -> None:
        """Ask for another batch, if there is room for it."""
        if self._resting or self._asking or self._suspect or not self._free:
            return
        if sum(not asked for asked in self._busy.values()) < self._most_unasked:
            self._asking = lane = self._free.popleft()
            self.batcher.enlist(lane)

    def _withdraw(self) -> None:
        lane, self._asking = self._asking, None
        for one in (*self._busy, *([lane] if lane else ())):
            self.batcher.withdraw(one)

    def _abandon(self) -> tuple[Sequence[Job], Sequence[Job]]:
        lanes = list(self._busy)
        blamed = self._blamed(lanes)
        self._busy, self._suspect = {}, None
        held: list[Job] = []
        others: list[Job] = []
        for lane in lanes:
            jobs, waiting = lane.give_up()
            (held if lane in blamed else others).extend(jobs)
            others.extend(waiting)
        return held, others

    def _blamed(self, lanes: "Sequence[_Lane]") -> "Sequence[_Lane]":
        """Whose batch may have cost the worker its life."""
        if not self.connection.overlaps:
            return lanes[:1]  # it runs one after the other, and all it has answered we have read
        # Those that it has asked behind, and one it may have begun with before it asks.
        begun = [lane for lane in lanes if self._busy[lane]]
        begun += [lane for lane in lanes if not self._busy[lane]][:1]
        return [self._suspect] if self._suspect in begun else begun


@dataclass(eq=False)
class _Lane(OneAtATime):
    """One of the batches that are outstanding at a worker."""

    owner: SeveralAtATime

    @classmethod
    def of(cls, owner: SeveralAtATime) -> "_Lane":
        return cls(
            owner.connection,
            owner.batcher,
            owner.metrics,
            owner.timeout,
            owner.is_anyone_left,
            owner.budget,
            owner,
        )

    @property
    def in_hand(self) -> int:  # type: ignore[override]  # a constant of those that have one batch
        """See `batcher.BatchRunner`."""
        return self.owner.in_hand

    def run(self, batch: Batch) -> None:
        """See `Runner.run`."""
        super().run(batch)
        self.owner.took(self, batch)

    def give_up(self) -> tuple[Sequence[Job], Sequence[Job]]:
        """Forget what is in hand; see `Serving._abandon`."""
        return self._abandon()

    def _on_reply(self, batch: Batch, reply: Reply) -> None:
        if reply.asks:
            self.owner.asked_behind(self)
        else:
            super()._on_reply(batch, reply)

    def _go_on(self) -> None:
        self.owner.answered(self)


def serve_batches(
    connection: WorkerConnection,
    batcher: Batcher,
    metrics: ModelMetrics,
    *,
    timeout: float | None,
    is_anyone_left: Callable[[], bool],
    budget: RetryBudget,
    outstanding: int | None = None,
    devices: int = 1,
) -> Serving:
    """Serve a worker that is ready, with as many batches outstanding as it can use.

    Args:
        connection: To the worker.
        batcher: See `Serving`.
        metrics: See `Serving`.
        timeout: See `Serving`.
        is_anyone_left: See `Serving`.
        budget: See `OneAtATime`.
        outstanding: The most batches; None for as many as it has devices and three more where its
            stages overlap (the rule of AWS Neuron's NEURON_MAX_NUM_INFERS), else one.
        devices: Those of the worker.
    """
    if outstanding is None:
        outstanding = devices + STAGES if connection.overlaps else 1
    common = connection, batcher, metrics, timeout, is_anyone_left, budget
    return OneAtATime(*common) if outstanding == 1 else SeveralAtATime(*common, outstanding)
