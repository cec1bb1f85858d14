"""Batches by length, through the batcher, in virtual time."""

import asyncio
import math
import random
import time
from collections.abc import Callable
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job, Priority
from marserve.frontend.batching.options import Batching
from marserve.frontend.errors import Overloaded

Cost = Callable[[int, float], float]


def padded(size: int, longest: float) -> float:
    return 0.005 + 0.0001 * size * longest


def of_size(size: int, longest: float) -> float:
    del longest
    return 0.005 + 0.01 * size


class Setup:
    """A batcher with one worker, which ends a batch on demand; jobs are named by length."""

    outstanding = 0

    def __init__(self, loop: Any, batching: Batching, cost: Cost) -> None:
        self.loop, self.cost = loop, cost
        self.queue = JobQueue(batching.queue_size)
        self.batcher = Batcher(self.queue, batching, loop, loop.time)
        self.batch: Batch | None = None
        self.batches: list[list[int]] = []
        self.seen = 0

    def run(self, batch: Batch) -> None:
        self.batch = batch
        self.batches.append([len(job.input.parts[0].body) for job in batch.jobs])

    def put(self, *lengths: int, within: float = math.inf, **options: Any) -> list[Job]:
        jobs = []
        for length in lengths:
            now = self.loop.time()
            input_ = Input(str(length), {}, [Part("body", "", bytes(length))])
            future = self.loop.create_future()
            job = fakes.AwaitedJob(input_, now, future, deadline=now + within, **options)
            self.batcher.put(job)
            jobs.append(job)
        return jobs

    def hire(self) -> None:
        if self.batch is None and not self.batcher.workers.idle:
            self.batcher.mark_idle(self)

    def finish(self) -> None:
        batch, self.batch = self.batch, None
        assert batch is not None
        seconds = self.cost(batch.run_as, max(self.batches[-1]))
        self.loop.now += seconds
        batch.deliver([Prediction(b"")] * len(batch))
        self.batcher.record(batch, seconds, succeeded=True)
        self.batcher.mark_idle(self, batch)

    def finish_all(self) -> list[list[int]]:
        """Run until nothing is left; returns the batches since the last time."""
        while self.batch is not None or self.queue:
            if self.batch is not None:
                self.finish()
            else:  # many are refused, in steps
                self.loop.run_until_complete(asyncio.sleep(0))
        seen, self.seen = self.seen, len(self.batches)
        return self.batches[seen:]


@pytest.fixture
def make(loop):
    """A greedy batcher for up to 8, by length."""

    def make_setup(cost=padded, **settings):
        settings = {"policy": "greedy", "size": 8, "bucket_by": "length", **settings}
        return Setup(loop, Batching(queue_size=10_000, **settings).check(), cost)

    return make_setup


def learn(setup: Setup, seed: int = 0, batches: int = 40) -> None:
    """Have batches run of many sizes and lengths."""
    rng = random.Random(seed)
    setup.hire()
    for _ in range(batches):
        setup.put(*(round(100 * rng.lognormvariate(0, 0.8)) for _ in range(rng.randint(1, 8))))
        setup.finish_all()


def test_from_the_first_batch_on_alike_lengths_go_together(make):
    setup = make()
    setup.put(10, 1000, 11, 1001, 12, 1002)
    setup.hire()
    assert setup.finish_all() == [[10, 11, 12], [1000, 1001, 1002]]


def test_the_most_urgent_job_is_always_in_the_next_batch(make):
    setup = make()
    learn(setup)
    rng = random.Random(1)
    jobs = []
    while len(setup.batches) < 300:
        jobs += setup.put(*(round(100 * rng.lognormvariate(0, 1.2)) for _ in range(12)))
        jobs = [job for job in jobs if job.dispatched is None]
        first = min(jobs, key=lambda job: job.order) if jobs else None
        setup.finish()
        assert first is None or first.dispatched is not None
    setup.finish_all()


def test_priorities_go_first(make):
    setup = make(size=2)
    setup.put(10, 10)
    setup.put(1000, priority=Priority.HIGH)
    setup.hire()
    assert setup.finish_all() == [[1000], [10, 10]]


def test_groups_do_not_share_a_batch(make):
    setup = make()
    setup.put(10, 10)
    setup.put(10, group=Group.EXPLAIN)
    setup.put(10)
    setup.hire()
    assert setup.finish_all() == [[10, 10, 10], [10]]


def test_one_who_leaves_is_not_run(make):
    setup = make()
    jobs = setup.put(10, 11, 12)
    for job in jobs[:2]:
        job.cancel()
    setup.queue.discard(jobs[1])
    setup.hire()
    assert setup.finish_all() == [[12]]


def test_compiled_sizes_are_padded_by_what_that_costs(make):
    setup = make(compiled_sizes=(1, 4, 8))
    learn(setup)
    setup.put(500, *[100] * 4)  # five would run as eight of the longest
    assert setup.finish_all() == [[500], [100] * 4]


def test_a_long_job_that_comes_first_does_not_join_short_ones(make):
    """The batches of the first jobs depended on the length of the very first."""
    setup = make(policy="fixed", delay=1.0)
    setup.hire()
    setup.put(9000)
    setup.put(100, 9100, 110, 9200, 120)
    setup.loop.run_until_complete(asyncio.sleep(1.0))
    assert setup.finish_all() == [[9000, 9100, 9200], [100, 110, 120]]


def test_a_full_window_leaves_though_lengths_differ(make):
    setup = make(policy="fixed", size=4, delay=10.0)
    setup.hire()
    setup.put(10, 1000, 11)
    assert setup.batches == []
    setup.put(1001)
    assert setup.batches == [[10, 11]]


def test_singles_stay_single(make):
    setup = make(policy="fixed_or_single", size=4, delay=0.0)
    setup.put(10, 10)
    setup.hire()
    assert setup.finish_all() == [[10], [10]]


def test_auto_waits_until_lengths_are_seen_to_matter(make):
    setup = make(bucket_by="auto")
    setup.put(10, 1000, 11, 1001)
    setup.hire()
    assert setup.finish_all() == [[10, 1000, 11, 1001]]
    learn(setup)
    setup.put(500)  # something runs meanwhile
    setup.put(10, 1000, 11, 1001)
    assert setup.finish_all() == [[500], [10, 11], [1000, 1001]]


def test_auto_needs_few_batches_where_lengths_decide_the_cost(make):
    setup = make(bucket_by="auto")
    learn(setup, batches=4)
    assert 5 <= len(setup.batches) < 16
    setup.put(500)  # something runs meanwhile
    setup.put(10, 1000, 11, 1001)
    assert setup.finish_all() == [[500], [10, 11], [1000, 1001]]


def test_auto_leaves_the_order_alone_where_lengths_do_not_matter(make):
    setup = make(of_size, bucket_by="auto")
    learn(setup)
    setup.put(500)  # something runs meanwhile
    setup.put(10, 1000, 11, 1001)
    assert setup.finish_all() == [[500], [10, 1000, 11, 1001]]


@pytest.mark.parametrize("bucket_by", ["auto", "length"])
def test_it_ends_when_lengths_do_not_matter_any_more(make, bucket_by):
    setup = make(bucket_by=bucket_by)
    learn(setup)
    assert setup.batcher.learning.lengths is not None
    assert setup.batcher.learning.lengths.is_active
    setup.cost = of_size
    rounds = iter(range(600))
    while setup.batcher.learning.lengths.is_active:
        learn(setup, seed=next(rounds), batches=1)
    for size in (2, 4, 8):  # the costs without lengths
        assert setup.batcher.costs.mean(size) == pytest.approx(of_size(size, 1), rel=0.05)
    setup.put(500)
    setup.put(10, 1000)
    assert setup.finish_all() == [[500], [10, 1000]]


def test_length_begins_again_when_lengths_matter_after_all(make):
    setup = make(of_size)
    learn(setup)
    lengths = setup.batcher.learning.lengths
    assert lengths is not None
    assert not lengths.is_active
    assert "differ in cost" in lengths.why
    setup.cost = padded
    rounds = iter(range(400))
    while not lengths.is_active:
        learn(setup, seed=next(rounds), batches=1)
    setup.put(500)
    setup.put(10, 1000, 11, 1001)
    assert setup.finish_all() == [[500], [10, 11], [1000, 1001]]


def test_what_auto_has_learnt_is_used_when_somebody_asks_for_it(make):
    setup = make(of_size, bucket_by="auto")
    learn(setup)
    setup.batcher.reconfigure(Batching(policy="greedy", size=8, bucket_by="length"))
    setup.cost = padded
    learn(setup, seed=1, batches=600)
    lengths = setup.batcher.learning.lengths
    assert lengths is not None
    costs = []
    for longest in (100.0, 1000.0):
        lengths.costs.use_batch(4, longest)
        costs.append(lengths.costs.mean(4))
    assert costs == pytest.approx([padded(4, 100), padded(4, 1000)], rel=0.2)
    setup.batcher.reconfigure(Batching(policy="greedy", size=8, bucket_by="auto"))
    assert lengths.is_active


def test_it_is_switched_while_jobs_wait(make):
    setup = make(bucket_by="none")
    setup.put(10, 1000, 11)
    setup.batcher.reconfigure(Batching(policy="greedy", size=8, bucket_by="length"))
    setup.hire()
    assert setup.finish_all() == [[10, 11], [1000]]
    setup.batcher.reconfigure(Batching(policy="greedy", size=8))
    setup.put(5)
    setup.put(10, 1000, 11)
    assert setup.finish_all() == [[5], [10, 1000, 11]]


def test_a_job_whose_worker_died_runs_alone_and_the_others_by_length(make):
    setup = make()
    (job,) = setup.put(10)
    setup.hire()
    setup.batcher.remove(setup, [setup.batch] if setup.batch else [])
    setup.batch = None
    setup.put(10, 1000, 10)
    job.crashes = 1
    setup.batcher.requeue([job])
    setup.hire()
    assert setup.finish_all() == [[10], [10], [10, 10], [1000]]


def test_a_long_request_that_cannot_be_in_time_is_refused_and_a_short_one_is_not(make):
    setup = make(policy="adaptive", max_latency=0.05, delay=0.0)
    learn_in_time(setup)
    with pytest.raises(Overloaded):
        setup.put(2000)  # 0.205 s
    setup.put(50)
    assert setup.finish_all() == [[50]]


def test_a_list_that_is_admitted_to_learn_what_it_costs_is_formed_by_length(make):
    setup = make(policy="adaptive", max_latency=0.05, delay=0.0)
    learn_in_time(setup)
    setup.loop.now += 60.0
    jobs = [
        fakes.AwaitedJob(
            Input(str(length), {}, [Part("body", "", bytes(length))]),
            setup.loop.now,
            setup.loop.create_future(),
        )
        for length in (2000, 50, 60)  # the first of them alone takes 0.205 s
    ]
    setup.batcher.put(*jobs)
    setup.finish_all()
    assert all(job.future.done() for job in jobs)


def learn_in_time(setup: Setup) -> None:
    rng = random.Random(0)
    setup.hire()
    for _ in range(60):
        setup.put(rng.randint(10, 200))
        setup.finish_all()


def test_whoever_is_admitted_is_answered_in_time(make):
    setup = make(policy="adaptive", max_latency=0.1, delay=0.0)
    learn_in_time(setup)
    rng = random.Random(1)
    jobs = []
    for _ in range(200):
        for _ in range(rng.randint(0, 8)):
            try:
                jobs += setup.put(round(100 * rng.lognormvariate(0, 0.8)))
            except Overloaded:
                continue
        if setup.batch is not None:
            setup.finish()
            late = [job for job in jobs if job.arrived + 0.1 < setup.loop.now and job.is_open]
            assert all(job.dispatched is None for job in late)
    setup.finish_all()
    answered = [
        job for job in jobs if not job.future.cancelled() and job.future.exception() is None
    ]
    assert len(answered) > 0.5 * len(jobs)


def test_thousands_that_are_late_are_refused_at_once(make):
    setup = make(policy="adaptive", max_latency=0.1, delay=0.0)
    learn_in_time(setup)
    setup.put(50)
    jobs = setup.put(*[40, 50, 60] * 1000)
    setup.loop.now += 10.0  # a pause
    began = time.process_time()
    setup.finish_all()
    assert time.process_time() - began < 10.0  # 0.1 s; a minute if each asked about all the others
    assert all(isinstance(job.future.exception(), Overloaded) for job in jobs)


def test_a_question_that_comes_while_a_batch_is_held_leaves_alone(make):
    setup = make(policy="fixed", size=4, delay=10.0)
    setup.hire()
    setup.put(10, 11)
    setup.put(0, group=Group.DESCRIBE, priority=Priority.HIGH)
    assert setup.batches == [[0]]


def test_the_size_that_is_cheapest_with_failures_does_not_depend_on_the_last_length(make):
    setup = make(lambda size, longest: 0.05 + 0.00001 * size * longest, compiled_sizes=(1, 4, 8))
    learn(setup, batches=60)
    for _ in range(20):
        setup.batcher.isolation.rate.request_failed()
    setup.batcher.note_failures()
    lengths = setup.batcher.learning.lengths
    assert lengths is not None
    sizes = set()
    for longest in (1.0, 1e5):
        lengths.costs.use_batch(8, longest)
        setup.batcher.seed([])  # to determine the size again
        sizes.add(setup.batcher.size)
    assert len(sizes) == 1
    assert "requests fail" in setup.batcher.learning.why


# -- what the handler says -------------------------------------------------------------------------


def test_what_the_handler_says_is_learnt_and_used(make):
    setup = make(lambda size, longest: padded(size, min(longest, 300)))
    setup.hire()
    assert setup.batcher.learning.lengths is not None
    lengths = list(range(10, 900, 10))
    random.Random(0).shuffle(lengths)
    for length in lengths:
        setup.put(length)
        assert setup.batch is not None
        assert setup.batcher.learn_lengths(setup.batch, [[0, min(length, 300) / 10]]) == 0
        setup.finish_all()
    assert setup.batcher.learning.lengths.relation.is_used
    setup.put(500)
    setup.put(400, 20, 800, 30)  # those beyond 300 are of one length
    assert setup.finish_all() == [[500], [400, 800], [20, 30]]


@pytest.mark.parametrize(
    "found", [[[0, -1.0]], [[7, 3.0]], [[-1, 3.0]], [[0, math.nan]], [[0, math.inf]], [[0, 1e200]]]
)
def test_what_it_cannot_tell_changes_nothing(make, found):
    setup = make()
    setup.hire()
    for _ in range(60):
        setup.put(10)
        assert setup.batch is not None
        failures = setup.batcher.learn_lengths(setup.batch, found)
        assert failures == (found == [[0, -1.0]])
        setup.finish_all()
    assert setup.batcher.learning.lengths is not None
    assert not setup.batcher.learning.lengths.relation.is_used
    setup.batcher.reconfigure(Batching(policy="greedy", size=8))
    setup.put(10)
    assert setup.batch is not None
    assert setup.batcher.learn_lengths(setup.batch, [[0, 3.0]]) == 0


def test_the_history_tells_what_was_padded(make):
    setup = make()
    setup.put(100, 100, 50)
    setup.hire()
    setup.finish_all()
    (document,) = setup.batcher.history.documents()
    assert (document["longest"], document["paddingShare"]) == (100.0, 0.167)
