"""The batcher with each policy, under random events in random order, in virtual time."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import fakes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job, Priority
from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.model_schema import BATCH_POLICIES, BUCKETS
from marserve.frontend.errors import Overloaded, WorkerDied

HIGH, NORMAL, LOW = Priority
TIMER = 0.001
EPSILON = 1e-6


def cost(rows: int) -> float:
    return 0.004 + 0.0005 * rows


class Worker:
    """Takes a while for each batch; its life may end in the middle of one."""

    outstanding = 0

    def __init__(self, play: "Play", seconds: Callable[[int], float]) -> None:
        self.play, self.seconds = play, seconds
        self.batch: Batch | None = None
        self.idle_since = play.loop.time()

    def run(self, batch: Batch) -> None:
        assert self.batch is None
        self.batch = batch
        self.play.dispatched(batch, self)
        took = self.seconds(batch.run_as)
        self.timer = self.play.loop.call_later(took, self.done, batch, took)

    def done(self, batch: Batch, took: float) -> None:
        self.batch = None
        batch.deliver([Prediction(b"")] * len(batch))
        self.play.batcher.record(batch, took, succeeded=True)
        self.idle_since = self.play.loop.time()
        self.play.batcher.mark_idle(self, batch)

    def die(self) -> None:
        self.play.workers.remove(self)
        self.play.batcher.remove(self, [self.batch] if self.batch else [])
        if self.batch is None:
            return
        self.timer.cancel()
        again = []
        for job in self.batch.jobs:
            job.crashes += 1
            if job.crashes > 1:
                job.fail(WorkerDied())
            elif job.is_open:
                again.append(job)
        self.batch = None
        self.play.batcher.requeue(again)


class Play:
    """A batcher, its workers and its clients in virtual time; every rule is watched all along."""

    def __init__(self, batching: Batching) -> None:
        self.loop = fakes.VirtualLoop()
        self.queue = JobQueue(batching.queue_size)
        self.batcher = Batcher(self.queue, batching, self.loop, self.loop.time)
        self.workers: list[Worker] = []
        self.batches: list[tuple[Batch, float]] = []
        self.accepted: list[Job] = []
        self.answers: dict[Job, list[float]] = {}
        self.runs: dict[Job, int] = {}
        self.forget()

    def forget(self) -> None:
        self.offered = 0
        self.answered: list[Job] = []
        self.late: list[Job] = []
        self.batches.clear()

    def run(self, scenario: Coroutine[Any, Any, None]) -> None:
        try:
            self.loop.run(scenario)
        finally:
            self.loop.close()

    def hire(self, seconds: Callable[[int], float] = cost) -> None:
        worker = Worker(self, seconds)
        self.workers.append(worker)
        self.batcher.mark_idle(worker)

    def offer(
        self,
        count: int = 1,
        *,
        within: float = math.inf,
        priority: Priority = NORMAL,
        group: Group = Group.PREDICT,
    ) -> None:
        """Send requests, all of which are let in or refused each by itself."""
        for _ in range(count):
            self.offer_list(1, within=within, priority=priority, group=group)

    def offer_list(
        self, count: int, *, within: float, priority: Priority, group: Group = Group.PREDICT
    ) -> None:
        """Send a request with several rows: all of them are let in, or none."""
        now, jobs = self.loop.time(), []
        for place in range(count):
            self.offered += 1
            body = b"x" * (1 + 7919 * self.offered % 50)
            job = fakes.AwaitedJob(
                fakes.make_input(body, id_=str(len(self.accepted) + place)),
                now,
                self.loop.create_future(),
                group,
                deadline=now + within,
                priority=priority,
            )
            job.future.add_done_callback(lambda _, job=job: self._answered(job))
            jobs.append(job)
        if self.queue.has_capacity(priority, count):
            with contextlib.suppress(Overloaded):
                self.batcher.put(*jobs)
                self.accepted += jobs
                self.check_workers()

    def suspect(self, place: int) -> None:
        """What such a request contains has failed alone."""
        self.batcher.isolation.remember(self.accepted[place % len(self.accepted)])

    def leave(self, place: int) -> None:
        """A client goes, and its place in the queue with it."""
        job = self.accepted[place % len(self.accepted)]
        if not job.future.done():
            job.cancel()
            self.queue.discard(job)

    def _answered(self, job: Job) -> None:
        self.answers.setdefault(job, []).append(self.loop.time())
        if job.future.cancelled() or job.future.exception() is not None:
            return
        self.answered.append(job)
        if self.loop.time() > job.deadline + EPSILON:
            self.late.append(job)

    def dispatched(self, batch: Batch, worker: Worker) -> None:
        self.batches.append((batch, worker.idle_since))
        is_trial = batch.reason is Reason.EXPLORATION
        assert 1 <= len(batch) <= (self.batcher.learning.largest if is_trial else self.batcher.size)
        assert batch.run_as >= len(batch)
        assert len({job.group for job in batch.jobs}) == 1
        assert [job.order for job in batch.jobs] == sorted(job.order for job in batch.jobs)
        for job in batch.jobs:
            assert job.is_open
            assert job.dispatched == batch.closed == self.loop.time()
            self.runs[job] = self.runs.get(job, 0) + 1
            assert self.runs[job] <= 1 + job.crashes
            assert not (job.crashes or job.is_suspected) or len(batch) == 1

    def check_workers(self) -> None:
        workers = self.batcher.workers
        busy = [worker for worker in self.workers if worker.batch is not None]
        assert workers.idle == len(self.workers) - len(busy)
        assert set(workers.busy) == {worker.batch for worker in busy}
        assert workers.in_flight == sum(len(worker.batch) for worker in busy if worker.batch)

    def check_the_end(self) -> None:
        """Each accepted job has had its one answer, and has left nothing behind."""
        assert len(self.queue) == 0
        capacities = self.batcher.batching.capacities
        for priority in Priority:
            assert self.queue.free_capacity(priority) == capacities.get(
                priority, self.queue.capacity
            )
        for job in self.accepted:
            assert len(self.answers[job]) == 1
            assert job.dispatched is not None or job not in self.answered


# -- a cost that was overestimated -----------------------------------------------------------------


def slow_at_first(times: int, factor: float) -> Callable[[int], float]:
    ran = iter(range(10**9))
    return lambda rows: cost(rows) * (factor if next(ran) < times else 1.0)


@pytest.mark.parametrize("slow", [1, 2])
@pytest.mark.parametrize("at_once", [1, 32])
def test_a_first_batch_that_was_far_too_slow_is_got_over(at_once, slow):
    """As when a model is compiled in its first run. Otherwise all jobs would always be refused."""
    play = Play(Batching(policy="adaptive", size=32, max_latency=0.05, queue_size=1000))

    async def scenario():
        play.hire(slow_at_first(slow, 100.0))
        play.offer(at_once)
        for _ in range(3000):  # 1.5 times what it can do without batches
            await asyncio.sleep(1 / 333)
            play.offer()
        play.forget()
        for _ in range(1000):
            await asyncio.sleep(1 / 333)
            play.offer()
        await asyncio.sleep(1.0)

    play.run(scenario())
    assert len(play.answered) >= 0.99 * play.offered
    assert play.late == []


# -- a class that others overtake ------------------------------------------------------------------


@pytest.mark.parametrize("gap", [0.0025, 0.005, 0.008])  # of what it can do: 2.4, 1.2, 0.75 times
def test_under_a_stream_of_a_higher_class_a_low_one_hears_in_time(gap):
    """It is answered in time, or else refused no later than a goal after its deadline."""
    goal = 0.1
    play = Play(Batching(policy="adaptive", size=4, max_latency=goal, is_queue_bounded=False))

    async def scenario():
        play.batcher.seed((rows, 4 * cost(rows)) for rows in (1, 2, 4))
        play.hire(lambda rows: 4 * cost(rows))
        play.offer(4, priority=HIGH)
        for number in range(1200):
            if number % 20 == 0:
                play.offer(priority=LOW)
            play.offer(priority=HIGH)
            await asyncio.sleep(gap)
        await asyncio.sleep(1.0)

    play.run(scenario())
    play.check_the_end()
    low = [job for job in play.accepted if job.priority is LOW]
    assert low
    for job in low:
        assert play.answers[job][0] <= job.deadline + goal
    assert play.late == []
    if gap > 0.006:  # less than it can do: they are served, too
        assert len([job for job in low if job in play.answered]) >= 0.9 * 60


# -- each rule, always -------------------------------------------------------------------

PAUSES = st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.004, 0.01, 0.05, 0.2])
WITHIN = st.sampled_from([math.inf, math.inf, 0.01, 0.03, 0.1, 1.0])


@st.composite
def batchings(draw: st.DrawFn) -> Batching:
    policy = draw(st.sampled_from(BATCH_POLICIES))
    sizes = draw(st.sampled_from([(), (), (1, 4), (2, 4, 8)]))
    size = draw(st.integers(1, sizes[-1] if sizes else 8))
    return Batching(
        policy=policy,
        size=size,
        is_automatic=draw(st.booleans()),
        delay=draw(st.sampled_from([0.0, 0.002, 0.01, 0.1])),
        max_latency=draw(st.sampled_from([0.0, 0.03, 0.2])) if policy == "adaptive" else 0.0,
        num_requests=draw(st.sampled_from([0, 0, 1, 5])),
        compiled_sizes=sizes,
        queue_size=draw(st.sampled_from([1, 5, 100])),
        is_queue_bounded=draw(st.booleans()),
        capacities=draw(st.sampled_from([{}, {HIGH: 3, LOW: 1}])),
        bucket_by=draw(st.sampled_from(BUCKETS)),
    ).check()


Event = tuple[str, Any]
EVENTS = st.lists(
    st.tuples(
        PAUSES,
        st.one_of(
            st.tuples(
                st.just("offer"),
                st.tuples(
                    st.integers(1, 4), WITHIN, st.sampled_from(Priority), st.sampled_from(Group)
                ),
            ),
            st.tuples(
                st.just("list"),
                st.tuples(st.integers(2, 12), WITHIN, st.sampled_from(Priority)),
            ),
            st.tuples(st.just("leave"), st.integers(0, 99)),
            st.tuples(st.just("suspect"), st.integers(0, 99)),
            st.tuples(st.just("change"), batchings()),
            st.tuples(st.just("hire"), st.sampled_from([0.0, 0.5, 1.0, 4.0])),
            st.tuples(st.just("lose"), st.integers(0, 9)),
            st.tuples(st.just("memory"), st.integers(1, 8)),
        ),
    ),
    max_size=60,
)


async def _act(play: Play, events: list[tuple[float, Event]]) -> None:
    for pause, (name, value) in events:
        await asyncio.sleep(pause)
        if name == "offer":
            count, within, priority, group = value
            play.offer(count, within=within, priority=priority, group=group)
        elif name == "list":
            count, within, priority = value
            play.offer_list(count, within=within, priority=priority)
        elif name == "leave" and play.accepted:
            play.leave(value)
        elif name == "suspect" and play.accepted:
            play.suspect(value)
        elif name == "change":
            play.batcher.reconfigure(value)
        elif name == "hire":
            play.hire(lambda rows, pace=value: pace * cost(rows))
        elif name == "lose" and play.workers:
            play.workers[value % len(play.workers)].die()
        elif name == "memory":
            play.batcher.out_of_memory(value)
        play.check_workers()
    play.hire()
    await asyncio.sleep(60.0)
    play.check_workers()


@settings(max_examples=200)
@given(batching=batchings(), events=EVENTS)
def test_whatever_happens_each_accepted_job_is_answered_once(batching, events):
    play = Play(batching)
    play.run(_act(play, events))
    play.check_the_end()


ARRIVALS = st.lists(st.tuples(PAUSES, st.integers(1, 6)), max_size=40)


async def arrivals_of(
    play: Play, arrivals: Sequence[tuple[float, int] | tuple[float, int, float]]
) -> None:
    for pause, count, *within in arrivals:
        await asyncio.sleep(pause)
        play.offer(count, within=within[0] if within else math.inf)
    await asyncio.sleep(60.0)


def names(batches: list[tuple[Batch, float]]) -> Iterator[int]:
    for batch, _ in batches:
        for job in batch.jobs:
            yield int(job.input.id)


@settings(max_examples=100)
@given(
    size=st.integers(1, 5),
    delay=st.sampled_from([0.0, 0.002, 0.01, 0.1]),
    paces=st.lists(st.sampled_from([0.0, 0.5, 3.0, 50.0]), min_size=1, max_size=3),
    arrivals=ARRIVALS,
)
def test_in_a_fixed_window_each_leaves_in_turn_in_time_and_in_good_company(
    size, delay, paces, arrivals
):
    play = Play(Batching(size=size, delay=delay, queue_size=1000))
    for pace in paces:
        play.hire(lambda rows, pace=pace: pace * cost(rows))
    play.run(arrivals_of(play, arrivals))
    assert list(names(play.batches)) == list(range(len(play.accepted)))
    for batch, idle_since in play.batches:
        oldest, youngest = batch.jobs[0].arrived, batch.jobs[-1].arrived
        assert batch.closed <= max(oldest + delay, idle_since) + TIMER + EPSILON
        if len(batch) == size:
            assert batch.closed <= max(youngest, idle_since) + TIMER + EPSILON


@pytest.mark.parametrize("policy", BATCH_POLICIES)
@settings(max_examples=50)
@given(size=st.integers(1, 8), workers=st.integers(1, 3), arrivals=ARRIVALS)
def test_equals_leave_in_the_order_in_which_they_came(policy, size, workers, arrivals):
    play = Play(Batching(policy=policy, size=size, delay=0.01, queue_size=1000))
    for _ in range(workers):
        play.hire()
    play.run(arrivals_of(play, arrivals))
    assert list(names(play.batches)) == list(range(len(play.accepted)))
    assert len(play.answered) == len(play.accepted)


@settings(max_examples=150)
@given(
    size=st.integers(1, 16),
    workers=st.integers(1, 4),
    goal=st.sampled_from([0.006, 0.012, 0.03, 0.1]),
    delay=st.sampled_from([0.0, 0.01, 0.1]),
    arrivals=st.lists(st.tuples(PAUSES, st.integers(1, 6), WITHIN), max_size=40),
)
def test_with_known_costs_whoever_is_answered_is_answered_in_time(
    size, workers, goal, delay, arrivals
):
    batching = Batching(
        policy="adaptive", size=size, delay=delay, max_latency=goal, queue_size=1000
    )
    play = Play(batching)
    play.batcher.seed((rows, cost(rows)) for rows in (1, 2, 4, 8, 16))
    for _ in range(workers):
        play.hire()
    play.run(arrivals_of(play, arrivals))
    assert play.late == []
    for batch, _ in play.batches:
        for job in batch.jobs:
            assert batch.closed + cost(len(batch)) <= job.deadline + EPSILON
