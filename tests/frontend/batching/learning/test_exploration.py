"""Exploration through the batcher that uses it, in virtual time: how large batches become."""

import contextlib
import math
import random
from collections.abc import Callable
from typing import Any

import fakes
import pytest

from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Job
from marserve.frontend.batching.options import Batching
from marserve.frontend.errors import Overloaded

Cost = Callable[[int], float]
EXPLORATION = Reason.EXPLORATION


def line(size: int) -> float:
    return 0.004 + 0.00035 * size


def cliff(size: int) -> float:
    """Batches beyond 16 do not fit into a cache: the best size is 16."""
    return line(size) + (0.015 if size > 16 else 0.0)


def convex(size: int) -> float:
    """The best size is about 14."""
    return 0.004 + 0.00002 * size**2


def noisy_line() -> Cost:
    """The line with a lognormal factor of sigma 1 and mean 1."""
    chance = random.Random(5)
    return lambda size: line(size) * chance.lognormvariate(-0.5, 1.0)


class Served:
    """A model whose one worker has a batch at a time, each of which takes its cost."""

    def __init__(self, loop: Any, batching: Batching) -> None:
        self._loop = loop
        self.now = 0.0
        self.batcher = Batcher(JobQueue(100_000), batching, loop, lambda: self.now)
        self.batches: list[Batch] = []
        self.busy = 0.0
        self.batcher.mark_idle(self)
        self.outstanding = 0

    def run(self, batch: Batch) -> None:
        self.batches.append(batch)

    def serve(self, cost: Cost, batches: int, waiting: int = 64, most: int = 1000) -> list[Batch]:
        """Serve and return a number of batches, while ``waiting`` jobs are queued.

        Larger ones than ``most`` fail, and none of their jobs alone.
        """
        first = len(self.batches)
        for _ in range(batches):
            for _ in range(waiting - len(self.batcher.queue)):
                with contextlib.suppress(Overloaded):
                    self.batcher.put(self._job())
            batch = self.batches[-1]
            seconds = cost(batch.run_as)
            self.now = batch.closed + seconds
            self.busy += seconds
            self.batcher.record(batch, seconds, succeeded=len(batch) <= most)
            if len(batch) > most:
                self.batcher.failed_together(most + 1)
            self.batcher.mark_idle(self, batch)
        return self.batches[first : first + batches]

    def _job(self) -> Job:
        job: Job = fakes.AwaitedJob(fakes.make_input(), self.now, self._loop.create_future())
        return job

    @property
    def tried(self) -> list[int]:
        return [len(batch) for batch in self.batches if batch.reason is EXPLORATION]


@pytest.fixture
def make_served(loop):
    def make(policy="adaptive", size=32, **settings):
        return Served(loop, Batching(policy=policy, size=size, queue_size=1000, **settings))

    return make


@pytest.mark.parametrize(("cost", "best"), [(cliff, {16}), (convex, {12, 16})])
@pytest.mark.parametrize("policy", ["adaptive", "greedy"])
def test_under_backlog_the_best_size_is_found(make_served, policy, cost, best):
    served = make_served(policy, is_automatic=policy == "greedy")
    served.serve(cost, 3, waiting=2)  # small ones while no jobs wait
    served.serve(cost, 40)
    assert served.batcher.size in best
    assert served.tried
    assert "throughput" in served.batcher.learning.why


@pytest.mark.simulation
def test_the_largest_size_below_a_jump_of_the_costs_is_found_soon(make_served):
    """Half-way to the costs behind the jump, a size of 16 would be no better than one of 12."""
    served = make_served()
    for queued in (1, 6, 8, 12, 12, 20, 31, 31):
        served.serve(cliff, 1, queued)
    assert {len(batch) for batch in served.serve(cliff, 40)[-10:]} == {16}


def test_where_full_batches_are_best_little_is_lost(make_served):
    served = make_served()
    served.serve(line, 3, waiting=2)
    served.serve(line, 1000)
    assert served.batcher.size == 32
    assert 0 < served.batcher.learning.exploration.lost < 0.01 * served.busy
    assert len(served.tried) < 100


@pytest.mark.simulation
def test_the_loss_is_bounded_where_small_batches_are_very_bad(make_served):
    served = make_served()
    served.serve(lambda size: 1.0, 3, waiting=1)
    served.serve(lambda size: 1.0, 1000)
    assert served.batcher.size == 32
    assert served.batcher.learning.exploration.lost <= 3.0 + 0.03 * served.busy + 1.0


def test_without_backlog_little_is_tried(make_served):
    served = make_served()
    for waiting in (*range(2, 31), 1, 16):
        served.serve(line, 20, waiting=waiting)
    assert len(served.tried) < 5


def test_clients_that_take_turns_in_two_groups_are_backlog(make_served):
    served = make_served()
    for _ in range(40):  # 48 clients that wait for their answers: no batch has all 32
        served.serve(cliff, 1, waiting=18)
        served.serve(cliff, 1, waiting=30)
    assert 12 <= served.batcher.size <= 16


@pytest.mark.parametrize("policy", ["fixed", "greedy", "fixed_or_single"])
def test_a_size_that_was_set_is_kept(make_served, policy):
    served = make_served(policy)
    served.serve(cliff, 3, waiting=32)
    batches = served.serve(cliff, 100)
    assert {len(batch) for batch in batches} == {32}


def test_of_compiled_sizes_only_those_are_tried(make_served):
    served = make_served(compiled_sizes=(1, 8, 16, 32))
    served.serve(cliff, 3, waiting=1)
    served.serve(cliff, 40)
    assert 12 <= served.batcher.size <= 16
    assert set(served.tried) <= {1, 8, 16}


@pytest.mark.simulation
def test_noise_does_not_make_batches_small(make_served):
    noisy = noisy_line()
    served = make_served()
    served.serve(noisy, 3, waiting=2)
    served.serve(noisy, 200)
    sizes = [len(batch) for batch in served.serve(noisy, 1000) if batch.reason is not EXPLORATION]
    assert sum(sizes) / len(sizes) > 24


@pytest.mark.simulation
def test_a_size_is_tried_no_longer_than_the_budget_lasts(make_served):
    noisy = noisy_line()
    served = make_served()
    served.serve(noisy, 3, waiting=2)
    exploration = served.batcher.learning.exploration
    for _ in range(400):
        before, batch = exploration.lost, served.serve(noisy, 1)[0]
        if batch.reason is EXPLORATION:
            # The budget is exceeded by the loss of one batch at most.
            assert before <= 5 * served.batcher.costs.mean(32) + 0.03 * served.busy
    assert served.tried


@pytest.mark.simulation
def test_a_cliff_that_comes_later_is_noticed(make_served):
    served = make_served()
    served.serve(line, 3, waiting=2)
    served.serve(line, 300)
    assert served.batcher.size == 32
    served.serve(cliff, 600)
    assert 12 <= served.batcher.size <= 16
    served.serve(line, 3000)
    assert served.batcher.size == 32


def test_a_size_whose_first_batch_compiled_code_is_not_lost(make_served):
    seen = set()

    def compiled(size):
        seconds = cliff(size) + (0.1 if size not in seen else 0.0)
        seen.add(size)
        return seconds

    served = make_served()
    served.serve(compiled, 3, waiting=2)
    served.serve(compiled, 1000)
    assert 12 <= served.batcher.size <= 16


def test_batches_that_fit_the_goal_are_tried_only(make_served):
    served = make_served(size=64, max_latency=0.03, is_queue_bounded=False)
    served.serve(convex, 3, waiting=2)
    served.serve(convex, 200, waiting=64)
    assert served.batcher.size in {12, 16}
    assert max(served.tried) <= 32
    assert math.isfinite(served.batcher.learning.exploration.lost)


def test_the_best_size_is_known_although_it_was_seen_once(make_served):
    served = make_served()
    for waiting in (1, 4, 8, 16):
        served.serve(cliff, 1, waiting=waiting)
    served.serve(cliff, 20)
    assert 12 <= served.batcher.size <= 16


def test_sizes_that_fail_were_tried_for_ever(make_served):
    served = make_served("greedy", size=4, is_automatic=True)
    served.batcher.seed([(1, 0.01)])
    served.serve(line, 200, most=1)
    assert served.batcher.size == 1
    assert len([batch for batch in served.batches if len(batch) > 1]) <= 8


def test_a_size_that_does_not_fit_into_memory_is_tried_no_more(make_served):
    served = make_served()
    served.serve(cliff, 3, waiting=2)
    for _ in range(3000):
        served.serve(cliff, 1)
        if served.batcher.learning.exploration.size > served.batcher.size:
            break
    trial = served.batches[-1]
    assert trial.reason is EXPLORATION
    served.batcher.record(trial, 0.01, succeeded=False)
    served.batcher.limit_size(len(trial), "it needs too much memory", 8)
    served.batcher.mark_idle(served, trial)
    fits = served.batcher.learning.largest
    served.serve(cliff, 60)
    assert fits < len(trial)
    assert max(map(len, served.batches[-61:])) == fits
