import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job, Priority
from marserve.frontend.batching.options import Batching
from marserve.frontend.batching.policies import MAX_SHED
from marserve.frontend.errors import Overloaded, WorkerDied

HIGH, NORMAL, LOW = Priority
EPSILON = 1e-6


class Runner:
    """Takes batches and notes when; idle again only when it is finished."""

    def __init__(self, setup: "Setup", outstanding: int = 0) -> None:
        self.setup = setup
        self.outstanding = outstanding
        self.batches: list[Batch] = []
        setup.batcher.mark_idle(self)

    @property
    def got(self) -> list[tuple[float, list[int]]]:
        return [(self.setup.since(batch.closed), self.setup.names(batch)) for batch in self.batches]

    def run(self, batch: Batch) -> None:
        self.batches.append(batch)

    def finish(self, seconds: float, *, succeeded: bool = True) -> None:
        """Answer the last batch, as if it had taken so long."""
        batch = self.batches[-1]
        if succeeded:
            batch.deliver([Prediction(b"")] * len(batch))
        else:
            batch.fail(WorkerDied())
        self.setup.batcher.record(batch, seconds, succeeded=succeeded)
        self.setup.batcher.mark_idle(self, batch)


class Setup:
    """A batcher in virtual time; jobs are named by the order in which they come."""

    def __init__(self, loop: Any, batching: Batching) -> None:
        self.loop = loop
        self.queue = JobQueue(batching.queue_size)
        self.batcher = Batcher(self.queue, batching, loop, loop.time)
        self.began = loop.time()
        self.jobs: list[Job] = []

    def since(self, moment: float) -> float:
        return float(round(moment - self.began, 9))

    def names(self, batch: Batch) -> list[int]:
        return [int(job.input.id) for job in batch.jobs]

    def job(
        self,
        *,
        within: float = math.inf,
        priority: Priority = NORMAL,
        group: Group = Group.PREDICT,
    ) -> Job:
        now = self.loop.time()
        input_ = fakes.make_input(id_=str(len(self.jobs)))
        future = self.loop.create_future()
        job = fakes.AwaitedJob(input_, now, future, group, deadline=now + within, priority=priority)
        self.jobs.append(job)
        return job

    def put(self, count: int = 1, **job: Any) -> None:
        for _ in range(count):
            self.batcher.put(self.job(**job))

    def idle(self, count: int = 1) -> list[Runner]:
        return [Runner(self) for _ in range(count)]

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def make_setup(loop):
    """A batcher of these settings; by default a window of a second, four to a batch."""

    def make(policy="fixed", **settings):
        settings = {"size": 4, "delay": 1.0, "queue_size": 1000, **settings}
        return Setup(loop, Batching(policy=policy, **settings))

    return make


# -- the window, in time ---------------------------------------------------------------------------


def test_a_full_batch_leaves_at_once(make_setup):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put(3)
    assert runner.got == []
    setup.put()
    assert runner.got == [(0.0, [0, 1, 2, 3])]


def test_the_window_counts_from_the_arrival_of_the_oldest(make_setup):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put()
    setup.wait(0.9)
    setup.put()
    setup.wait(0.2)
    assert runner.got == [(1.0, [0, 1])]


def test_jobs_that_waited_behind_a_busy_worker_do_not_wait_again(make_setup):
    setup = make_setup()
    setup.put(2)
    setup.wait(5.0)
    [runner] = setup.idle()
    assert runner.got == [(5.0, [0, 1])]


def test_a_worker_that_comes_late_waits_only_for_the_rest_of_the_window(make_setup):
    setup = make_setup()
    setup.put()
    setup.wait(0.6)
    [runner] = setup.idle()
    setup.wait(1.0)
    assert runner.got == [(1.0, [0])]


def test_without_delay_an_idle_worker_takes_each_job_as_it_comes(make_setup):
    setup = make_setup(delay=0.0)
    [runner] = setup.idle()
    setup.put()
    assert runner.got == [(0.0, [0])]


def test_without_delay_all_that_is_queued_leaves_up_to_the_size(make_setup):
    setup = make_setup(delay=0.0)
    setup.put(7)
    runners = setup.idle(3)
    assert [runner.got for runner in runners] == [[(0.0, [0, 1, 2, 3])], [(0.0, [4, 5, 6])], []]


def test_a_worker_gets_one_batch_for_each_time_it_was_idle(make_setup):
    setup = make_setup(size=1, delay=0.0)
    [runner] = setup.idle()
    setup.put(2)
    assert runner.got == [(0.0, [0])]
    setup.batcher.mark_idle(runner, runner.batches[-1])
    assert [names for _, names in runner.got] == [[0], [1]]


def test_who_has_been_idle_longest_is_next(make_setup):
    setup = make_setup(size=1)
    first, second = setup.idle(2)
    setup.put()
    setup.batcher.mark_idle(first, first.batches[-1])
    setup.put(2)
    assert [names for _, names in first.got] == [[0], [2]]
    assert [names for _, names in second.got] == [[1]]


def test_a_removed_worker_gets_nothing_and_the_next_takes_over_its_window(make_setup):
    setup = make_setup()
    [gone] = setup.idle()
    setup.put()
    setup.batcher.remove(gone, gone.batches)
    setup.batcher.remove(gone, gone.batches)
    setup.wait(0.5)
    setup.put(3)
    setup.wait(2.0)
    assert gone.got == []
    [next_] = setup.idle()
    assert [names for _, names in next_.got] == [[0, 1, 2, 3]]


def test_jobs_nobody_waits_for_never_reach_a_worker(make_setup):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put(3)
    setup.jobs[0].cancel()
    setup.jobs[1].fail(WorkerDied())
    setup.jobs[1].future.exception()
    setup.wait(2.0)
    assert runner.got == [(1.0, [2])]


def test_a_window_over_nothing_but_dead_jobs_keeps_the_worker_idle(make_setup):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put()
    setup.jobs[0].cancel()
    setup.wait(2.0)
    assert runner.got == []
    setup.put(4)
    assert runner.got == [(2.0, [1, 2, 3, 4])]


def test_when_the_oldest_leaves_the_line_the_next_gets_its_whole_window(make_setup):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put()
    setup.wait(0.5)
    setup.put()
    setup.queue.discard(setup.jobs[0])
    setup.wait(2.0)
    assert runner.got == [(1.5, [1])]


def test_a_job_knows_when_it_was_dispatched(make_setup):
    setup = make_setup(size=1)
    setup.idle()
    setup.put(2)
    assert setup.jobs[0].dispatched == setup.loop.time()
    assert setup.jobs[1].dispatched is None


def test_nothing_rings_while_nothing_is_held(make_setup):
    setup = make_setup("greedy")
    timers = Timers()
    setup.batcher = Batcher(setup.queue, setup.batcher.batching, timers, setup.loop.time)
    setup.put(3)
    setup.idle(2)
    setup.put(3)
    assert timers.open == 0


def test_nothing_rings_when_nobody_is_idle_any_more(make_setup):
    setup = make_setup()
    timers = Timers()
    setup.batcher = Batcher(setup.queue, setup.batcher.batching, timers, setup.loop.time)
    first, second = setup.idle(2)
    setup.put()
    assert timers.open == 1
    setup.batcher.remove(first, first.batches)
    assert timers.open == 1
    setup.batcher.remove(second, second.batches)
    assert timers.open == 0


class Timers:
    """Counts what is going to ring."""

    open = 0

    def call_later(self, delay: float, callback: Callable[[], object]) -> "Timers":
        self.open += 1
        return self

    def cancel(self) -> None:
        self.open -= 1


# -- who goes first --------------------------------------------------------------------------------


def test_a_higher_class_goes_first_and_the_order_of_each_is_kept(make_setup):
    setup = make_setup("greedy", size=3)
    for priority in (LOW, NORMAL, HIGH, LOW, NORMAL, HIGH):
        setup.put(priority=priority)
    first, second = setup.idle(2)
    assert [first.got, second.got] == [[(0.0, [2, 5, 1])], [(0.0, [4, 0, 3])]]


@pytest.mark.parametrize(
    ("policy", "longest"), [("greedy", 2.0), ("adaptive", 2.0), ("fixed", 2.0)]
)
def test_a_low_class_is_served_while_a_high_one_keeps_coming(make_setup, policy, longest):
    setup = make_setup(policy, size=2, queue_size=8, delay=0.0)
    [runner] = setup.idle()
    setup.put(priority=LOW)
    setup.put(priority=LOW)
    runner.finish(0.01)
    for _ in range(1000):
        setup.put(setup.queue.free_capacity(HIGH), priority=HIGH)
        setup.wait(0.01)
        runner.finish(0.01)
        if setup.jobs[1].dispatched is not None:
            break
    # Twice the time that a lower priority may wait longer; then the capacity that was used before.
    assert setup.loop.time() - setup.began <= longest + 8 / 2 * 0.01 + EPSILON


def test_with_adaptive_the_earliest_deadline_goes_first(make_setup):
    setup = make_setup("adaptive", size=2)
    setup.batcher.seed([(1, 0.01), (2, 0.011)])
    for within in (0.9, 0.3, 0.5, 0.3):
        setup.put(within=within)
    first, second = setup.idle(2)
    assert [first.got, second.got] == [[(0.0, [1, 3])], [(0.0, [2, 0])]]


def test_each_priority_has_its_own_capacity(make_setup):
    setup = make_setup(queue_size=2, capacities={LOW: 1})
    setup.put(2)
    setup.put(priority=LOW)
    assert [setup.queue.has_capacity(priority) for priority in Priority] == [True, False, False]


def test_a_batch_closes_when_the_queue_is_full(make_setup):
    """A full queue closes a batch: no other job could join."""
    setup = make_setup(size=8, queue_size=3)
    [runner] = setup.idle()
    setup.put(3)
    assert runner.got == [(0.0, [0, 1, 2])]


def test_those_of_one_request_leave_together(make_setup):
    setup = make_setup("greedy", size=3)
    first, second = setup.idle(2)
    setup.batcher.put(*[setup.job() for _ in range(5)])
    assert [first.got, second.got] == [[(0.0, [0, 1, 2])], [(0.0, [3, 4])]]


def test_those_of_one_request_are_let_in_all_or_none(make_setup):
    setup = make_setup("adaptive", size=4, max_latency=0.1)
    setup.batcher.seed([(1, 0.04), (4, 0.09)])
    setup.put(2)
    jobs = [setup.job() for _ in range(99)]
    jobs[50].deadline = 0.0
    with pytest.raises(Overloaded):
        setup.batcher.put(*jobs)
    assert len(setup.queue) == 2
    [runner] = setup.idle()
    assert runner.got == [(0.0, [0, 1])]


def test_now_and_then_one_that_seems_hopeless_is_run_to_see_what_it_takes(make_setup):
    setup = make_setup("adaptive", size=4, max_latency=0.05)
    setup.batcher.seed([(1, 10.0)])
    [runner] = setup.idle()
    setup.put()
    assert runner.got == [(0.0, [0])]
    with pytest.raises(Overloaded):  # while it runs
        setup.put()
    runner.finish(10.0)
    with pytest.raises(Overloaded):
        setup.put()
    setup.wait(1.0)
    setup.put()
    assert len(runner.got) == 2


def test_where_nothing_is_learnt_only_one_in_a_second_is_tried(make_setup):
    setup = make_setup("adaptive", size=4, max_latency=0.05)
    setup.batcher.seed([(1, 10.0)])
    [runner] = setup.idle()
    setup.put()
    runner.finish(0.0, succeeded=False)
    setup.wait(0.5)
    with pytest.raises(Overloaded):
        setup.put()
    setup.wait(0.5)
    setup.put()
    assert len(runner.got) == 2


def test_a_quick_model_that_was_slow_for_a_moment_is_soon_itself_again(make_setup):
    setup = make_setup("adaptive", size=1, max_latency=0.005)
    setup.batcher.seed([(1, 0.02)])  # the machine was busy; in truth it takes a tenth of that
    [runner] = setup.idle()
    refused = 0
    for _ in range(1000):  # a thousand requests a second
        try:
            setup.put()
        except Overloaded:
            refused += 1
        if not setup.batcher.workers.idle:
            runner.finish(0.002)
        setup.wait(0.001)
    assert refused < 900
    setup.put()


def test_a_list_that_seems_hopeless_is_tried_where_nothing_was_learnt_for_a_while(make_setup):
    setup = make_setup("adaptive", size=4, max_latency=0.1)
    setup.batcher.seed([(1, 5.0), (4, 5.2)])  # a slow start; it is fast in truth
    [runner] = setup.idle()

    def ask():
        jobs = [setup.job() for _ in range(6)]
        setup.batcher.put(*jobs)
        while setup.batcher.workers.idle == 0:
            runner.finish(0.01)
        return jobs

    first = ask()
    assert runner.got[0] == (0.0, [0, 1, 2, 3])  # that much is found out; others are not in time
    assert isinstance(first[4].future.exception(), Overloaded)
    with pytest.raises(Overloaded):
        ask()
    assert len(setup.queue) == 0
    for _ in range(5):
        setup.wait(1.0)
        last = ask()
    assert all(job.future.result() for job in last)


# -- retries, alone -------------------------------------------------------------------------------


def test_who_was_in_a_crash_runs_first_and_by_itself(make_setup):
    setup = make_setup("greedy")
    [victim] = setup.idle()
    setup.put()
    setup.put(2)
    setup.batcher.remove(victim, victim.batches)
    [heir] = setup.idle()
    assert heir.got == [(0.0, [1, 2])]
    for job in setup.jobs:
        job.crashes = 1
    setup.put(2)
    setup.batcher.requeue(setup.jobs[:3])
    runners = setup.idle(4)
    assert [runner.got for runner in runners] == [
        [(0.0, [0])],
        [(0.0, [1])],
        [(0.0, [2])],
        [(0.0, [3, 4])],
    ]
    assert [runner.batches[0].reason for runner in runners[:3]] == [Reason.ALONE] * 3


def test_a_request_that_runs_alone_again_does_not_wait_for_a_window(make_setup):
    setup = make_setup()
    first, second = setup.idle(2)
    setup.put(4)
    setup.put()
    setup.wait(0.5)
    setup.batcher.remove(first, first.batches)
    setup.jobs[0].crashes = 1
    setup.batcher.requeue(setup.jobs[:1])
    assert second.got == [(0.5, [0])]
    [third] = setup.idle()
    setup.wait(1.0)
    assert third.got == [(1.0, [4])]


# -- the workers -----------------------------------------------------------------------------------


def workers_of(setup: Setup) -> tuple[int, int, int]:
    workers = setup.batcher.workers
    return workers.idle, len(workers.busy), workers.in_flight


def test_the_state_of_the_workers_is_known_at_any_time(make_setup):
    setup = make_setup("greedy")
    assert workers_of(setup) == (0, 0, 0)
    first, second = setup.idle(2)
    assert workers_of(setup) == (2, 0, 0)
    setup.put()
    assert workers_of(setup) == (1, 1, 1)
    setup.batcher.put(*[setup.job() for _ in range(3)])
    assert workers_of(setup) == (0, 2, 4)
    second.finish(0.01)
    assert workers_of(setup) == (1, 1, 1)
    setup.batcher.remove(first, first.batches)  # in the middle of its batch
    setup.batcher.remove(first, first.batches)
    assert workers_of(setup) == (1, 0, 0)
    setup.batcher.remove(second, second.batches)
    assert workers_of(setup) == (0, 0, 0)


def test_a_worker_that_splits_a_failed_batch_is_known_to_be_busy_with_a_part(make_setup):
    setup = make_setup("adaptive", size=4)
    setup.batcher.seed([(1, 0.010), (4, 0.040)])
    setup.put(4)
    [runner] = setup.idle()
    setup.wait(0.05)
    late = setup.loop.time()
    setup.batcher.put(setup.job(within=0.03))  # any moment now
    part = Batch(runner.batches[0].jobs[:2], late, Reason.ISOLATION, 2, 0.025)
    setup.batcher.workers.replace(runner.batches[0], part)
    assert workers_of(setup) == (0, 1, 2)
    with pytest.raises(Overloaded):
        setup.batcher.put(setup.job(within=0.03))
    setup.batcher.put(setup.job(within=0.05))
    setup.batcher.remove(runner, [part])
    setup.batcher.workers.replace(part, runner.batches[0])
    assert workers_of(setup) == (0, 0, 0)


# -- what is learnt, and shown ---------------------------------------------------------------------


def test_a_batch_is_recorded_with_what_it_was_to_cost_and_did(make_setup):
    setup = make_setup()
    setup.batcher.seed([(1, 0.01), (2, 0.02), (4, 0.04)])
    setup.put()
    setup.wait(0.4)
    [runner] = setup.idle()
    setup.put(priority=HIGH)
    setup.wait(1.0)
    runner.finish(0.03)
    [document] = setup.batcher.history.documents()
    del document["closedAt"]
    assert document == {
        "size": 2,
        "ranAs": 2,
        "reason": "window",
        "oldestWaitedMs": 1000.0,
        "heldMs": 600.0,
        "predictedMs": 20.0,
        "handlerMs": 0.0,
        "tookMs": 30.0,
        "workerId": 0,
        "succeeded": True,
    }


def test_only_the_batch_that_was_held_is_recorded_as_such(make_setup):
    setup = make_setup(size=2, delay=1.0)
    runners = setup.idle(2)
    setup.put()
    setup.wait(0.5)
    setup.batcher.put(*[setup.job() for _ in range(3)])
    assert [runner.batches[0].held for runner in runners] == [pytest.approx(0.5), 0.0]


def test_a_batch_was_not_held_before_its_first_request_came(make_setup):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put()
    setup.wait(0.1)
    setup.jobs[0].cancel()
    setup.queue.discard(setup.jobs[0])
    setup.wait(0.4)
    setup.put()
    setup.wait(1.0)
    [batch] = runner.batches
    assert (batch.waited, batch.held) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("group", "succeeded"), [(Group.EXPLAIN, True), (Group.DESCRIBE, True), (Group.PREDICT, False)]
)
def test_only_predictions_that_succeeded_teach_what_a_prediction_costs(
    make_setup, group, succeeded
):
    setup = make_setup("greedy")
    [runner] = setup.idle()
    setup.put(group=group)
    runner.finish(9.0, succeeded=succeeded)
    assert not setup.batcher.costs.is_known
    assert len(setup.batcher.history) == 1


def test_of_several_workers_slow_batches_are_learnt_from_as_well(make_setup):
    """Others that began later are done before them."""
    setup = make_setup("greedy", size=1)
    slow, fast = setup.idle(2)
    for _ in range(50):
        setup.put(2)
        for _ in range(3):
            setup.wait(0.01)
            fast.finish(0.01)
            setup.put()
        setup.wait(0.01)
        slow.finish(0.04)
        fast.finish(0.01)
    # One in four of those that are learnt from takes four times as long as the others.
    costs = setup.batcher.costs
    low, high = (costs.distribution.quantile(share) * costs.mean(1) for share in (0.7, 0.8))
    assert low < 0.02 < high


# -- refusals --------------------------------------------------------------------------------------


def test_who_cannot_be_answered_in_time_hears_when_to_try_again(make_setup):
    setup = make_setup("adaptive", size=1)
    setup.batcher.seed([(1, 3.0)])
    setup.idle()
    setup.put(within=9.0)
    with pytest.raises(Overloaded) as refused:
        setup.put(within=5.0)
    assert 6 <= refused.value.retry_after <= 8
    assert len(setup.queue) == 0


def test_a_question_about_the_model_has_no_latency_goal(make_setup):
    setup = make_setup("adaptive", size=1, max_latency=0.03)
    setup.batcher.seed([(1, 0.04)])
    with pytest.raises(Overloaded):
        setup.put()
    setup.put(group=Group.DESCRIBE)
    setup.wait(0.1)
    [runner] = setup.idle()
    assert [setup.names(batch) for batch in runner.batches] == [[1]]


def test_who_can_no_longer_be_in_time_hears_it_when_the_next_request_comes(make_setup):
    """And not when a worker is idle at last, which may take long."""
    setup = make_setup("adaptive", size=4, max_latency=0.05)
    setup.batcher.seed([(1, 0.01), (4, 0.02)])
    setup.put(3)
    setup.wait(0.03)
    setup.put()
    assert all(job.is_open for job in setup.jobs)
    setup.wait(0.015)
    setup.put()
    assert [job.is_open for job in setup.jobs] == [False] * 3 + [True] * 2
    assert all(isinstance(job.future.exception(), Overloaded) for job in setup.jobs[:3])
    [runner] = setup.idle()
    assert [setup.names(batch) for batch in runner.batches] == [[3, 4]]


def test_jobs_of_a_dead_worker_are_refused_where_they_would_be_late(make_setup):
    setup = make_setup("adaptive", size=4, max_latency=0.05)
    setup.batcher.seed([(1, 0.01), (4, 0.02)])
    setup.put(4)
    [dead] = setup.idle()
    setup.batcher.remove(dead, dead.batches)
    for job in setup.jobs:
        job.crashes = 1
    setup.wait(0.025)
    setup.batcher.requeue(setup.jobs)
    [runner] = setup.idle()
    for _ in range(2):
        setup.wait(0.01)
        runner.finish(0.01)
    assert [setup.names(batch) for batch in runner.batches] == [[0], [1]]
    assert all(isinstance(job.future.exception(), Overloaded) for job in setup.jobs[2:])


@pytest.mark.parametrize("bucket_by", ["none", "length"])
def test_thousands_that_are_late_are_refused_in_steps(make_setup, bucket_by):
    setup = make_setup("adaptive", size=4, max_latency=0.05, queue_size=5000, bucket_by=bucket_by)
    setup.batcher.seed([(1, 0.01), (4, 0.02)])
    setup.put(4000)
    setup.loop.now += 10.0  # a pause
    [runner] = setup.idle()
    setup.put()
    queued = []

    def look():
        queued.append(len(setup.queue))
        if setup.queue:
            setup.loop.call_soon(look)

    look()
    setup.wait(0.001)
    assert all(0 <= before - after <= MAX_SHED for before, after in pairwise(queued))
    assert [setup.names(batch) for batch in runner.batches] == [[4000]]
    assert all(isinstance(job.future.exception(), Overloaded) for job in setup.jobs[:-1])


def test_who_is_shed_is_answered_and_hears_when_to_try_again(make_setup):
    setup = make_setup("adaptive", size=2)
    setup.batcher.seed([(1, 0.01), (2, 0.012)])
    setup.put(within=0.02)
    setup.put(within=9.0)
    setup.wait(0.5)
    [runner] = setup.idle()
    assert runner.got == [(0.5, [1])]
    error = setup.jobs[0].future.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after == 1


def test_who_has_left_is_not_counted_among_those_that_are_shed(make_setup):
    setup = make_setup("adaptive", size=2)
    setup.batcher.seed([(1, 0.01), (2, 0.012)])
    setup.put(2, within=0.05)
    setup.put(group=Group.EXPLAIN, within=0.05)
    setup.put(within=9.0)
    setup.jobs[0].cancel()
    setup.wait(0.5)
    [runner] = setup.idle()
    assert runner.got == [(0.5, [3])]
    assert all(isinstance(job.future.exception(), Overloaded) for job in setup.jobs[1:3])


def test_a_more_urgent_request_ends_a_hold_that_it_could_not_bear(make_setup):
    setup = make_setup("adaptive", size=8, delay=10.0)
    setup.batcher.seed((size, 0.02 + 0.0005 * size) for size in (1, 2, 4, 8))
    last = setup.idle(4)[-1]
    setup.put(3)  # the others are busy from now on
    for _ in range(500):  # of a load that is worth a hold
        setup.put()
        setup.wait(1 / 500)
        if last.batches and not last.batches[-1].jobs[0].future.done():
            last.finish(0.02 + 0.0005 * len(last.batches[-1]))
    while not setup.queue:
        setup.put()
    setup.put(within=0.024)
    urgent = setup.jobs[-1]
    setup.wait(0.002)
    assert urgent.dispatched is not None
    assert urgent.dispatched - urgent.arrived <= 0.0025


def test_a_member_who_would_be_late_is_refused_though_the_first_is_not(make_setup):
    """Two take 20 ms; the first by class is not the first by deadline."""
    setup = make_setup("adaptive", size=2, max_latency=0.1)
    setup.batcher.seed([(1, 0.010), (2, 0.020)])
    setup.put(priority=HIGH, within=0.05)
    setup.put(priority=LOW, within=0.015)
    [runner] = setup.idle()
    assert runner.got == [(0.0, [0])]
    assert isinstance(setup.jobs[1].future.exception(), Overloaded)
    assert len(setup.queue) == 0


def test_whether_a_member_would_be_late_is_seen_by_the_rows_that_run(make_setup):
    """Two run as four, which take 30 ms; two would take 17."""
    setup = make_setup("adaptive", size=4, max_latency=0.1, compiled_sizes=(1, 4))
    setup.batcher.seed([(1, 0.010), (4, 0.030)])
    setup.put(priority=HIGH, within=0.05)
    setup.put(priority=LOW, within=0.020)
    [runner] = setup.idle()
    assert runner.got == [(0.0, [0])]
    assert isinstance(setup.jobs[1].future.exception(), Overloaded)


@pytest.mark.parametrize("policy", ["fixed", "greedy", "fixed_or_single"])
def test_other_policies_refuse_nobody_for_lateness(make_setup, policy):
    setup = make_setup(policy, size=2)
    setup.batcher.seed([(1, 0.010), (2, 0.020)])
    setup.put(2, within=0.015)
    [runner] = setup.idle()
    assert runner.got == [(0.0, [0, 1])]


# -- clients that come back ------------------------------------------------------------------------


def test_one_worker_waits_a_moment_for_the_clients_it_has_answered(make_setup):
    setup = make_setup("adaptive", size=8, num_requests=3)
    setup.batcher.seed((size, 0.010) for size in (1, 2, 4))
    [runner] = setup.idle()
    setup.wait(1.0)
    setup.put()
    setup.put(2)
    assert runner.got == [(1.0, [0])]  # they had all the time
    setup.wait(0.010)
    runner.finish(0.010)
    setup.wait(0.002)
    assert len(runner.got) == 1
    setup.put()
    assert runner.got[1:] == [(1.012, [1, 2, 3])]
    assert runner.batches[-1].reason is Reason.FULL
    setup.wait(0.010)
    runner.finish(0.010)
    setup.put()
    setup.wait(0.1)
    assert runner.got[2:] == [(pytest.approx(1.027), [4])]


@pytest.mark.parametrize("compiled_sizes", [(), (1, 2, 4, 8)])
def test_clients_that_keep_coming_back_share_a_batch_though_nobody_gave_their_number(
    make_setup, compiled_sizes
):
    setup = make_setup("adaptive", size=8, compiled_sizes=compiled_sizes)
    setup.batcher.seed((size, 0.02) for size in (1, 2, 4, 8))
    [runner] = setup.idle()
    setup.batcher.put(*[setup.job() for _ in range(4)])
    for _ in range(40):
        setup.wait(0.02)
        runner.finish(0.02)
        for _ in range(4):
            setup.wait(0.0001)
            setup.put()
    assert len(runner.batches[1]) == 1  # not known yet
    assert [len(batch) for batch in runner.batches[-9:]] == [4] * 9


# -- a window and a deadline -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("within", "leaves"), [(math.inf, 1.0), (9.0, 1.0), (0.5, 0.1 + 0.5 - 0.2)]
)
def test_a_window_that_is_open_closes_early_for_one_who_comes_with_a_deadline(
    make_setup, within, leaves
):
    setup = make_setup(size=8)
    setup.batcher.seed([(1, 0.2)])
    for _ in range(300):
        setup.batcher.costs.observe(1, 0.2)  # a bound of hardly more
    [runner] = setup.idle()
    setup.put()
    setup.wait(0.1)
    setup.put(within=within)
    setup.wait(2.0)
    assert runner.got == [(pytest.approx(leaves, abs=0.02), [0, 1])]


# -- change while serving --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "leaves"),
    [
        ({"delay": 0.0}, 0.5),
        ({"delay": 0.7}, 0.7),
        ({"delay": 2.0}, 2.0),
        ({"size": 2}, 0.5),
        ({"num_requests": 2}, 0.5),
        ({"policy": "greedy"}, 0.5),
        ({"policy": "adaptive"}, 0.5),
        ({"policy": "fixed_or_single", "size": 2}, 0.5),
    ],
)
def test_a_change_holds_for_those_who_wait_already(make_setup, changes, leaves):
    setup = make_setup()
    [runner] = setup.idle()
    setup.put(2)
    setup.wait(0.5)
    setup.batcher.reconfigure(replace(setup.batcher.batching, **changes))
    setup.wait(5.0)
    assert runner.got == [(pytest.approx(leaves), [0, 1])]


def test_a_change_holds_for_the_next_batch_not_for_one_on_its_way(make_setup):
    setup = make_setup("greedy", size=4)
    [runner] = setup.idle()
    setup.put(5)
    setup.batcher.reconfigure(replace(setup.batcher.batching, size=2))
    runner.finish(0.01)
    runner.finish(0.01)
    assert [names for _, names in runner.got] == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize(("before", "after"), [("adaptive", "greedy"), ("greedy", "adaptive")])
def test_who_came_before_a_change_leaves_before_those_who_came_after(make_setup, before, after):
    setup = make_setup(before, size=2)
    setup.put(2)
    setup.batcher.reconfigure(replace(setup.batcher.batching, policy=after))
    setup.put(2)
    setup.put(priority=HIGH)
    first, second = setup.idle(2)
    assert [first.got, second.got] == [[(0.0, [4, 0])], [(0.0, [1, 2])]]


def test_capacities_change_too(make_setup):
    setup = make_setup(queue_size=3)
    setup.put(3)
    setup.batcher.reconfigure(replace(setup.batcher.batching, queue_size=2, capacities={HIGH: 1}))
    assert [setup.queue.free_capacity(priority) for priority in Priority] == [1, 0, 2]
    assert len(setup.queue) == 3


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"max_latency": 0.1}, 1000, 10_000),
        ({"max_latency": 0.1, "is_queue_bounded": True}, 5, 5),
        ({}, 5, 5),
        ({"max_latency": 0.1, "capacities": {NORMAL: 7}}, 7, 7),
    ],
)
def test_once_costs_are_known_refusals_bound_the_queue_of_a_model_with_a_goal(
    make_setup, settings, before, after
):
    setup = make_setup("adaptive", **{"queue_size": 5, "is_queue_bounded": False, **settings})
    assert setup.queue.free_capacity(NORMAL) == before
    setup.batcher.seed([(1, 0.01)])
    assert setup.queue.free_capacity(NORMAL) == after
    assert setup.batcher.size == 4


def test_the_first_batch_makes_costs_known(make_setup):
    setup = make_setup("adaptive", queue_size=5, is_queue_bounded=False, max_latency=0.1)
    [runner] = setup.idle()
    setup.put()
    runner.finish(0.01)
    assert setup.queue.free_capacity(NORMAL) == 10_000


def test_one_small_batch_makes_nobody_refused_who_may_be_in_time(make_setup):
    setup = make_setup("adaptive", size=64, is_queue_bounded=False, max_latency=0.1)
    runners = setup.idle(4)
    setup.put(4)
    setup.wait(0.02)
    setup.put(200)
    for runner in runners:
        runner.finish(0.02)
    assert [len(runner.batches[-1]) for runner in runners] == [64, 64, 64, 8]


# -- sizes -----------------------------------------------------------------------------------------


def test_compiled_sizes_are_run_and_the_rest_is_padding(make_setup):
    setup = make_setup("greedy", size=8, compiled_sizes=(2, 8))
    setup.put(3)
    setup.put()
    setup.put(group=Group.EXPLAIN)
    setup.put(group=Group.DESCRIBE)
    setup.jobs[0].cancel()
    setup.jobs[1].cancel()
    runners = setup.idle(3)
    ran = [(len(runner.batches[0]), runner.batches[0].run_as) for runner in runners]
    assert ran == [(2, 2), (1, 2), (1, 1)]


def test_a_request_that_runs_alone_again_runs_as_a_compiled_size_too(make_setup):
    setup = make_setup("greedy", size=4, compiled_sizes=(4,))
    job = setup.job()
    job.crashes = 1
    setup.batcher.requeue([job])
    [runner] = setup.idle()
    assert runner.batches[0].run_as == 4


LESSON = 0.0021  # costs are learnt from a batch every two milliseconds


def kinked(rows: int) -> float:
    """Up to eight at a time cost hardly more than one; beyond that each costs as if alone."""
    return 0.01 + 0.0001 * min(rows, 8) + 0.0013 * max(0, rows - 8)


def teach(setup: Setup, runner: Runner, batches: int, *sizes: int) -> None:
    for number in range(batches):
        setup.batcher.put(*[setup.job() for _ in range(sizes[number % len(sizes)])])
        runner.finish(kinked(runner.batches[-1].run_as))
        setup.wait(LESSON)


def test_batches_in_quick_succession_do_not_all_teach(make_setup):
    setup = make_setup("greedy", size=1)
    [runner] = setup.idle()
    for _ in range(100):
        setup.put()
        runner.finish(0.0001)
        setup.wait(LESSON / 10)
    assert 9 <= setup.batcher.costs.samples <= 11


def test_an_automatic_size_grows_with_traffic_until_the_best_is_seen(make_setup):
    setup = make_setup("greedy", size=128, is_automatic=True)
    [runner] = setup.idle()
    assert (setup.batcher.size, setup.batcher.learning.choice) == (128, None)
    teach(setup, runner, 100, 1, 2, 4)
    assert (setup.batcher.size, setup.batcher.learning.choice) == (128, None)
    teach(setup, runner, 100, 1, 8)
    assert (setup.batcher.size, setup.batcher.learning.choice) == (128, None)
    teach(setup, runner, 100, 1, 8, 16, 32)
    assert setup.batcher.size == 8
    assert setup.batcher.learning.choice is not None
    assert "times the throughput" in setup.batcher.learning.choice.why


@pytest.mark.parametrize("compiled_sizes", [(), (1, 8, 32)])
def test_an_automatic_size_is_not_chosen_by_sizes_that_ran_once_only(make_setup, compiled_sizes):
    """Eight are the best that was seen; that there is nothing better takes more larger batches."""
    settings = {"is_automatic": True, "compiled_sizes": compiled_sizes}
    setup = make_setup("greedy", size=32, **settings)
    [runner] = setup.idle()
    teach(setup, runner, 99, 1, 8)
    teach(setup, runner, 1, 32)
    assert (setup.batcher.size, setup.batcher.learning.choice) == (32, None)
    teach(setup, runner, 10, 32)
    assert setup.batcher.size == 8


def test_after_profiling_a_size_that_ran_once_is_not_chosen(make_setup):
    setup = make_setup("greedy", size=128, is_automatic=True)
    setup.batcher.seed((size, kinked(size)) for size in (1, 2, 4, 8, 16))
    [runner] = setup.idle()
    teach(setup, runner, 1, 100)
    setup.batcher.costs.observe(100, 0.001)
    setup.batcher.seed([])  # to look again
    assert setup.batcher.size == 8


def test_an_automatic_size_is_known_after_profiling(make_setup):
    setup = make_setup("greedy", size=128, is_automatic=True)
    setup.batcher.seed((size, kinked(size)) for size in (1, 2, 4, 8))
    assert setup.batcher.size == 8
    setup.batcher.reconfigure(replace(setup.batcher.batching, is_automatic=False, size=16))
    assert (setup.batcher.size, setup.batcher.learning.choice) == (16, None)


def test_an_automatic_size_is_not_chosen_from_compiled_ones_that_never_ran(make_setup):
    setup = make_setup("greedy", size=8, is_automatic=True, compiled_sizes=(1, 4, 8))
    [runner] = setup.idle()
    teach(setup, runner, 100, 1)
    assert (setup.batcher.size, setup.batcher.learning.choice) == (8, None)
    setup.batcher.seed((size, 0.01 * size) for size in (1, 4, 8))
    assert setup.batcher.size == 1


@pytest.mark.parametrize(("policy", "size"), [("adaptive", 8), ("greedy", 16)])
def test_with_adaptive_no_batch_is_so_large_that_it_only_becomes_slower(make_setup, policy, size):
    setup = make_setup(policy, size=16)
    setup.batcher.seed((rows, 0.01 * (1 if rows <= 8 else rows)) for rows in (1, 2, 4, 8, 16))
    assert (setup.batcher.size, setup.batcher.learning.choice) == (size, None)


def test_an_automatic_size_may_be_found_among_compiled_ones_above_one(make_setup):
    setup = make_setup("greedy", size=32, is_automatic=True, compiled_sizes=(4, 8, 32))
    setup.batcher.seed((rows, 0.01 if rows <= 8 else 0.05) for rows in (4, 8, 32))
    assert setup.batcher.size == 8


def test_an_automatic_size_is_one_where_batching_does_not_pay(make_setup):
    setup = make_setup("greedy", size=128, is_automatic=True)
    setup.batcher.seed((size, 0.01 * size) for size in (1, 2, 4, 8))
    assert setup.batcher.size == 1
    assert setup.batcher.learning.choice is not None
    assert "does not pay" in setup.batcher.learning.choice.why


def test_a_size_that_did_not_fit_into_memory_is_not_tried_again_for_a_while(make_setup):
    setup = make_setup("greedy", size=8)
    setup.batcher.out_of_memory(8)
    assert setup.batcher.size == 4
    assert "memory" in setup.batcher.learning.why
    [runner] = setup.idle()
    setup.wait(601.0)
    teach(setup, runner, 100, 1)
    assert setup.batcher.size == 5
    setup.batcher.reconfigure(replace(setup.batcher.batching, size=16))
    assert (setup.batcher.size, setup.batcher.learning.why) == (16, "")


@pytest.mark.parametrize("policy", ["greedy", "fixed", "adaptive"])
def test_after_ten_minutes_larger_batches_are_tried_though_hardly_a_batch_has_come(
    make_setup, policy
):
    setup = make_setup(policy, size=64, delay=0.0)
    [runner] = setup.idle()
    setup.batcher.out_of_memory(32)
    sizes = []
    for _ in range(6):  # one batch in ten minutes
        sizes.append(setup.batcher.size)
        setup.wait(600.0)
        setup.put()
        runner.finish(0.01)
    assert sizes == [16, 20, 25, 31, 38, 47]


def test_who_joins_a_batch_under_way_finds_the_size_grown_again(make_setup):
    setup = make_setup("fixed", size=8)
    setup.batcher.out_of_memory(4)
    setup.wait(600.0)
    setup.put(8)
    assert len(setup.batcher.take(Group.PREDICT, beside=1)) == 2


def test_the_time_in_which_answers_go_out_is_learnt_for_those_with_a_goal(make_setup):
    def bound(sending):
        setup = make_setup("adaptive", size=8, max_latency=1.0)
        setup.batcher.seed([(1, 0.01), (8, 0.02)])
        [runner] = setup.idle()
        for _ in range(100):
            setup.put()
            setup.wait(0.01)
            runner.finish(0.01)
            setup.batcher.deadline_admission.answer_sent(setup.loop.time() + sending)
            setup.wait(0.01)
        return setup.batcher.costs.bound(8)

    assert bound(0.003) == pytest.approx(bound(0.0) + 0.003, rel=0.01)


@pytest.mark.parametrize("capacity", [50, 1000])
def test_a_size_that_is_not_found_yet_is_described_as_such(make_setup, capacity):
    setup = make_setup("greedy", size=128, is_automatic=True, queue_size=capacity)
    assert (setup.batcher.size, setup.batcher.learning.why) == (min(128, capacity), "learning")


# -- workers with several batches ------------------------------------------------------------------


def test_whoever_has_fewest_batches_outstanding_is_served_first(make_setup):
    setup = make_setup("greedy")
    runners = [Runner(setup, outstanding) for outstanding in (2, 0, 1, 0)]
    runners[0].outstanding = 1
    for _ in range(4):
        setup.put()
    assert [runner.got for runner in runners] == [
        [(0.0, [2])],
        [(0.0, [0])],
        [(0.0, [3])],
        [(0.0, [1])],
    ]


def test_a_worker_that_asks_before_it_is_done_is_looked_at_again_when_it_is(make_setup):
    """A job that is held beside a busy worker leaves when that is idle."""
    setup = make_setup("adaptive", size=16)
    setup.batcher.seed([(1, 1.0), (16, 1.2)])
    [first] = setup.idle()
    setup.put(17)  # at once: as single requests they would exceed the worker's capacity
    [second], [asking] = setup.idle(), setup.idle()
    setup.put()
    for busy in (first, second):
        assert (len(busy.batches), len(asking.batches)) == (1, 0)
        setup.batcher.mark_done(busy.batches[0])
    assert len(asking.batches) == 1


def test_a_batch_that_is_answered_is_in_no_hand_any_more(make_setup):
    setup = make_setup(num_requests=2)
    first, second = setup.idle(2)
    setup.put()
    setup.wait(1.0)
    setup.batcher.mark_done(first.batches[0])
    setup.put()
    assert second.got == []
    setup.wait(1.0)
    assert second.got == [(2.0, [1])]


# -- requests that failed before -------------------------------------------------------------------


def of(setup: Setup, body: bytes) -> Job:
    job = setup.job()
    job.input.parts[0].body = body
    return job


@pytest.fixture
def wary(make_setup):
    """A batcher that remembers a content."""
    setup = make_setup(queue_size=8)
    setup.batcher.isolation.remember(of(setup, b"bad"))
    return setup


def test_a_flood_of_what_failed_before_leaves_others_half_of_the_places(wary):
    wary.jobs.clear()
    for _ in range(4):
        wary.batcher.put(of(wary, b"bad"))
    with pytest.raises(Overloaded) as refused:
        wary.batcher.put(of(wary, b"bad"))
    # No deadline is missed: there is none, and no costs are known.
    assert refused.value.message == "Too many requests whose content has failed before are waiting."
    assert (refused.value.status, refused.value.retry_after) == (503, 1)
    wary.put(4)
    [runner] = wary.idle()
    for _ in range(2):
        runner.finish(0.1)
    assert [names for _, names in runner.got] == [[0], [5, 6, 7, 8], [1]]


def test_what_failed_before_leaves_within_the_window_of_others(wary):
    [runner] = wary.idle()
    wary.jobs.clear()
    wary.put(2)
    wary.wait(0.5)
    wary.batcher.put(of(wary, b"bad"))
    assert runner.got == [(0.5, [2])]
    assert runner.batches[0].reason is Reason.SUSPECTED
    runner.finish(0.1)
    wary.wait(0.5)
    assert runner.got[1:] == [(1.0, [0, 1])]


def test_a_later_row_of_a_request_that_failed_before_waited_for_the_window(wary):
    [runner] = wary.idle()
    wary.jobs.clear()
    wary.put()
    wary.wait(0.5)
    wary.batcher.put(wary.job(), of(wary, b"bad"))
    assert runner.got == [(0.5, [2])]


def test_others_join_a_running_batch_until_a_suspected_job_has_waited_for_a_while(wary):
    wary.jobs.clear()
    wary.batcher.put(of(wary, b"bad"))
    wary.put()
    assert wary.batcher.take(Group.PREDICT, 1) == [wary.jobs[1]]
    wary.wait(1.5)
    wary.put()
    assert wary.batcher.take(Group.PREDICT, 1) == ()


def test_a_cancelled_suspect_leaves_the_worker_to_others(wary):
    wary.jobs.clear()
    wary.batcher.put(of(wary, b"bad"))
    wary.jobs[0].cancel()
    wary.put(4)
    [runner] = wary.idle()
    assert runner.got == [(0.0, [1, 2, 3, 4])]


# -- how long a newcomer would take ----------------------------------------------------------------


def test_a_newcomer_takes_as_long_as_what_is_ahead_of_it(make_setup):
    setup = make_setup("greedy")
    expected = setup.batcher.deadline_admission.expected_seconds
    first, _second = setup.idle(2)
    setup.put()
    assert expected() == 0.0  # of unknown costs nothing is expected
    setup.batcher.seed([(1, 1.0), (2, 2.0), (4, 4.0)])
    assert expected() == 0.0  # one is idle
    setup.put()
    assert expected() == 1.0
    setup.put(9)
    # Two full batches for two workers, then a batch with the newcomer and one more.
    assert expected() == pytest.approx(2 * 4.0 / 2 + 2.0)
    first.finish(1.0)
    # The second worker is idle after its second; one full batch is left, then that of the newcomer.
    assert expected() == pytest.approx(1.0 + 4.0 / 2 + 2.0)
