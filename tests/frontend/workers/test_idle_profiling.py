"""When idle moments are used to profile, in virtual time; the worker is imagined."""

import asyncio
from collections.abc import Callable
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import BatchCost, Profile, Profiled
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.options import Batching
from marserve.frontend.workers.dispatch.batched import Batched
from marserve.frontend.workers.idle_profiling import IdleProfiling

RUNS = 4  # of each size


class Worker(Batched):
    """Measures when it is told to `finish`; a size costs 10 ms and one for each row."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.asked: list[list[int]] = []
        self.batches: list[Batch] = []
        self.is_lost = False
        self._sizes: list[int] = []
        self._runs = 0
        self._on_reply: Callable[[Profiled], None] | None = None
        batcher.mark_idle(self)

    outstanding = 0
    can_profile = True

    @property
    def is_accepting(self) -> bool:
        return not self.is_lost

    def run_samples(self, message: Profile, seconds: float, on_reply: Any) -> None:
        del seconds
        self.asked.append(message.sizes)
        if message.sizes:
            self._sizes, self._runs = message.sizes, 0
        self.batcher.lend(self, 0.01)
        self._on_reply = on_reply

    def finish(self, note: str = "") -> None:
        """End the run that is under way."""
        self._runs += 1
        measured = self._sizes[: self._runs // RUNS]
        on_reply, self._on_reply = self._on_reply, None
        assert on_reply is not None
        if self.is_accepting:
            self.batcher.take_back(self)
        costs = [BatchCost(size, 0.01 + 0.001 * size, 0) for size in measured]
        on_reply(Profiled(costs, note))

    def run(self, batch: Batch) -> None:
        self.batches.append(batch)

    def answer(self) -> None:
        batch = self.batches.pop()
        self.batcher.record(batch, 0.01, succeeded=True)
        self.batcher.mark_idle(self, batch)

    def lose(self) -> None:
        self.is_lost = True
        self.batcher.remove(self, ())


class Served:
    def __init__(self, loop: Any) -> None:
        self.loop = loop
        self.batching = Batching(policy="adaptive", size=4, max_latency=1.0)
        self.batcher = Batcher(JobQueue(100), self.batching, loop, loop.time)
        self.worker = Worker(self.batcher)

        self.profiling = IdleProfiling("m", self.batcher)

    def begin(self, *sizes: int) -> None:
        async def begin() -> None:
            self.profiling.begin(sizes or [1, 2, 4], self.batching)

        self.loop.run_until_complete(begin())

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))

    def request(self) -> None:
        future = self.loop.create_future()
        input_ = fakes.make_input()
        self.batcher.put(fakes.AwaitedJob(input_, self.loop.time(), future))

    def finish(self, runs: int) -> None:
        for _ in range(runs):
            self.worker.finish()
            self.wait(0.0)


@pytest.fixture
def served(loop):
    served = Served(loop)
    yield served
    served.profiling.stop()
    served.wait(0.0)


def test_sizes_are_measured_once_nobody_has_asked_for_a_second(served):
    served.wait(5.0)
    served.begin()
    served.wait(0.9)
    assert served.worker.asked == []
    served.wait(0.2)
    assert served.worker.asked == [[1, 2, 4]]
    served.finish(3 * RUNS)
    assert served.worker.asked == [[1, 2, 4]] + [[]] * (3 * RUNS - 1)
    assert served.profiling.pending == ()
    assert served.batcher.costs.mean(4) == pytest.approx(0.014)
    assert served.batcher.costs.knows(2)
    assert [*served.batcher.workers.waiting] == [served.worker]


def test_while_requests_come_nothing_is_measured(served):
    served.begin()
    for _ in range(10):
        served.request()
        served.wait(0.5)
        served.worker.answer()
    assert served.worker.asked == []
    served.wait(2.1)
    assert served.worker.asked == [[1, 2, 4]]


def test_a_request_goes_before_the_next_run(served):
    served.begin()
    served.wait(1.1)
    served.request()
    assert served.worker.batches == []
    served.finish(1)
    assert len(served.worker.batches) == 1
    served.wait(0.01)
    served.worker.answer()
    assert len(served.worker.asked) == 1
    served.wait(2.1)
    assert served.worker.asked == [[1, 2, 4], []]


def test_what_is_known_needs_no_measuring(served):
    served.batcher.seed([(1, 0.01), (2, 0.01), (4, 0.01)])
    served.begin()
    served.wait(5.0)
    assert served.worker.asked == []


def test_it_ends_where_the_worker_says_why(served):
    served.begin()
    served.wait(1.1)
    served.worker.finish(note="there is no sample input")
    served.wait(5.0)
    assert served.worker.asked == [[1, 2, 4]]
    assert served.profiling.pending == ()


def test_other_sizes_are_measured_though_the_worker_of_the_last_run_is_lost(served):
    served.begin()
    served.wait(1.1)
    served.begin()
    served.worker.lose()
    other = Worker(served.batcher)
    served.wait(5.0)
    assert other.asked == [[1, 2, 4]]


def test_it_ends_with_a_worker_that_is_lost_over_it(served):
    served.begin()
    served.wait(1.1)
    served.worker.lose()
    other = Worker(served.batcher)
    served.wait(5.0)
    assert other.asked == []
    assert served.profiling.pending == ()


def test_it_waits_for_another_worker_if_the_last_run_ends_while_the_only_one_drains(served):
    served.begin()
    served.wait(1.1)
    served.worker.lose()
    served.finish(1)
    served.wait(3.0)
    other = Worker(served.batcher)
    served.wait(3.0)
    assert other.asked == [[1, 2, 4]]


def test_another_worker_begins_anew(served):
    served.begin()
    served.wait(1.1)
    served.request()
    served.finish(1)
    served.worker.answer()
    served.worker.lose()
    other = Worker(served.batcher)
    served.wait(3.0)
    assert other.asked == [[1, 2, 4]]


def test_what_comes_of_older_settings_is_not_used(served):
    served.begin()
    served.wait(1.1)
    served.begin(1, 2)
    served.finish(1)
    served.wait(2.1)
    assert served.worker.asked == [[1, 2, 4], [1, 2]]
    served.profiling.stop()
    served.finish(1)
    served.wait(5.0)
    assert len(served.worker.asked) == 2
