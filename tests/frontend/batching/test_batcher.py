import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batcher import Batch, Batcher
from marserve.frontend.batching.jobs import Job, JobQueue
from marserve.frontend.batching.policies import FixedWindow
from marserve.frontend.errors import WorkerDied

TIMER = 0.001
EPSILON = 1e-6


class Runner:
    """Takes batches and notes when; idle again only when told."""

    def __init__(self, room: "Room") -> None:
        self.room = room
        self.got: list[tuple[float, list[int]]] = []

    def run(self, batch: Batch) -> None:
        names = [int(job.input.id) for job in batch.jobs]
        self.got.append((self.room.elapsed, names))
        self.room.left += names


class Room:
    """A batcher in virtual time; jobs are named by the order in which they come."""

    def __init__(self, fakes: ModuleType, loop: Any, size: int, delay: float) -> None:
        self.fakes, self.loop = fakes, loop
        self.queue = JobQueue(1000)
        self.batcher = Batcher(self.queue, FixedWindow(size, delay), loop, loop.time)
        self.began = loop.time()
        self.jobs: list[Job] = []
        self.left: list[int] = []

    @property
    def elapsed(self) -> float:
        return float(round(self.loop.time() - self.began, 9))

    def put(self, count: int = 1) -> None:
        for _ in range(count):
            given = self.fakes.make_input(id_=str(len(self.jobs)))
            job = Job(given, self.loop.time(), self.loop.create_future())
            self.jobs.append(job)
            self.batcher.put(job)

    def idle(self, count: int = 1) -> list[Runner]:
        runners = [Runner(self) for _ in range(count)]
        for runner in runners:
            self.batcher.enlist(runner)
        return runners

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def room(fakes: ModuleType, loop: Any) -> Callable[..., Room]:
    return lambda size=4, delay=1.0: Room(fakes, loop, size, delay)


def test_a_full_batch_leaves_at_once(room: Callable[..., Room]) -> None:
    one = room()
    [runner] = one.idle()
    one.put(3)
    assert runner.got == []
    one.put()
    assert runner.got == [(0.0, [0, 1, 2, 3])]


def test_the_window_counts_from_the_arrival_of_the_oldest(room: Callable[..., Room]) -> None:
    one = room()
    [runner] = one.idle()
    one.put()
    one.wait(0.9)
    one.put()
    one.wait(0.2)
    assert runner.got == [(1.0, [0, 1])]


def test_jobs_that_waited_behind_a_busy_worker_do_not_wait_again(room: Callable[..., Room]) -> None:
    one = room()
    one.put(2)
    one.wait(5.0)
    [runner] = one.idle()
    assert runner.got == [(5.0, [0, 1])]


def test_a_worker_that_comes_late_waits_only_for_the_rest_of_the_window(
    room: Callable[..., Room],
) -> None:
    one = room()
    one.put()
    one.wait(0.6)
    [runner] = one.idle()
    one.wait(1.0)
    assert runner.got == [(1.0, [0])]


def test_without_delay_an_idle_worker_takes_each_job_as_it_comes(room: Callable[..., Room]) -> None:
    one = room(delay=0.0)
    [runner] = one.idle()
    one.put()
    assert runner.got == [(0.0, [0])]


def test_without_delay_all_that_is_queued_leaves_up_to_the_size(room: Callable[..., Room]) -> None:
    one = room(delay=0.0)
    one.put(7)
    runners = one.idle(3)
    assert [runner.got for runner in runners] == [[(0.0, [0, 1, 2, 3])], [(0.0, [4, 5, 6])], []]


def test_a_worker_gets_one_batch_for_each_time_it_was_idle(room: Callable[..., Room]) -> None:
    one = room(size=1, delay=0.0)
    [runner] = one.idle()
    one.put(2)
    assert runner.got == [(0.0, [0])]
    one.batcher.enlist(runner)
    assert [names for _, names in runner.got] == [[0], [1]]


def test_who_has_been_idle_longest_is_next(room: Callable[..., Room]) -> None:
    one = room(size=1)
    first, second = one.idle(2)
    one.put()
    one.batcher.enlist(first)
    one.put(2)
    assert [names for _, names in first.got] == [[0], [2]]
    assert [names for _, names in second.got] == [[1]]


def test_a_withdrawn_worker_gets_nothing_and_the_next_takes_over_its_window(
    room: Callable[..., Room],
) -> None:
    one = room()
    [gone] = one.idle()
    one.put()
    one.batcher.withdraw(gone)
    one.batcher.withdraw(gone)
    one.wait(0.5)
    one.put(3)
    one.wait(2.0)
    assert gone.got == []
    [next_] = one.idle()
    assert [names for _, names in next_.got] == [[0, 1, 2, 3]]


def test_jobs_nobody_waits_for_never_reach_a_worker(room: Callable[..., Room]) -> None:
    one = room()
    [runner] = one.idle()
    one.put(3)
    one.jobs[0].future.cancel()
    one.jobs[1].fail(WorkerDied())
    one.jobs[1].future.exception()
    one.wait(2.0)
    assert runner.got == [(1.0, [2])]


def test_a_window_over_nothing_but_dead_jobs_keeps_the_worker_idle(
    room: Callable[..., Room],
) -> None:
    one = room()
    [runner] = one.idle()
    one.put()
    one.jobs[0].future.cancel()
    one.wait(2.0)
    assert runner.got == []
    one.put(4)
    assert runner.got == [(2.0, [1, 2, 3, 4])]


def test_when_the_oldest_leaves_the_line_the_next_gets_its_whole_window(
    room: Callable[..., Room],
) -> None:
    one = room()
    [runner] = one.idle()
    one.put()
    one.wait(0.5)
    one.put()
    one.queue.discard(one.jobs[0])
    one.wait(2.0)
    assert runner.got == [(1.5, [1])]


def test_a_job_knows_when_it_was_dispatched(room: Callable[..., Room]) -> None:
    one = room(size=1)
    one.idle()
    one.put(2)
    assert one.jobs[0].dispatched == one.loop.time()
    assert one.jobs[1].dispatched is None


def test_a_batch_answers_each_job_with_its_own_prediction(room: Callable[..., Room]) -> None:
    one = room(size=2)
    one.put(2)
    batch = Batch(one.jobs, 0.0)
    assert [given.id for given in batch.inputs] == ["0", "1"]
    batch.deliver([Prediction(b"a"), Prediction(b"b")])
    assert [job.future.result().body for job in one.jobs] == [b"a", b"b"]
    batch.fail(WorkerDied())
    assert [job.future.exception() for job in one.jobs] == [None, None]


# -- whatever comes, in whatever order -------------------------------------------------------------


@dataclass
class Load:
    size: int
    delay: float
    workers: Sequence[float]  # the seconds each takes for a batch
    gaps: Sequence[float]  # between the jobs
    patience: Sequence[float | None]  # after how long the client of each job leaves


MOMENTS = st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.004, 0.01, 0.05, 0.2])
LOADS = st.integers(0, 25).flatmap(
    lambda jobs: st.builds(
        Load,
        st.integers(1, 5),
        st.sampled_from([0.0, 0.002, 0.01, 0.1]),
        st.lists(st.sampled_from([0.0, 0.003, 0.02, 0.3]), min_size=1, max_size=3),
        st.lists(MOMENTS, min_size=jobs, max_size=jobs),
        st.lists(st.none() | st.none() | MOMENTS, min_size=jobs, max_size=jobs),
    )
)


class Worker:
    """Idle again some time after each batch."""

    def __init__(self, room: Room, seconds: float) -> None:
        self.room, self.seconds = room, seconds
        self.enlist()

    def enlist(self) -> None:
        self.idle_since = self.room.loop.time()
        self.room.batcher.enlist(self)

    def run(self, batch: Batch) -> None:
        self.room.dispatched.append((batch, self.idle_since))  # type: ignore[attr-defined]
        self.room.loop.call_later(self.seconds, self.enlist)


async def _arrive(room: Room, load: Load) -> None:
    for gap, patience in zip(load.gaps, load.patience, strict=True):
        await asyncio.sleep(gap)
        room.put()
        if patience is not None:
            room.loop.call_later(patience, room.jobs[-1].future.cancel)
    await asyncio.sleep(60.0)


def _play(fakes: ModuleType, load: Load) -> Room:
    loop = fakes.VirtualLoop()
    try:
        room = Room(fakes, loop, load.size, load.delay)
        room.dispatched = []  # type: ignore[attr-defined]
        for seconds in load.workers:
            Worker(room, seconds)
        loop.run(_arrive(room, load))
        return room
    finally:
        loop.close()


@settings(max_examples=100)
@given(load=LOADS)
def test_each_job_leaves_once_in_order_in_time_and_in_good_company(
    fakes: ModuleType, load: Load
) -> None:
    room = _play(fakes, load)
    batches: list[tuple[Batch, float]] = room.dispatched  # type: ignore[attr-defined]
    left = [int(job.input.id) for batch, _ in batches for job in batch.jobs]
    assert left == sorted(set(left))
    stayed = [job for job in room.jobs if int(job.input.id) not in left]
    assert all(job.future.cancelled() and job.dispatched is None for job in stayed)
    for batch, idle_since in batches:
        oldest, youngest = batch.jobs[0].arrived, batch.jobs[-1].arrived
        assert 1 <= len(batch) <= load.size
        assert batch.closed <= max(oldest + load.delay, idle_since) + TIMER + EPSILON
        if len(batch) == load.size:
            assert batch.closed <= max(youngest, idle_since) + TIMER + EPSILON
