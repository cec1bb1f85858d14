import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.batches import Batch, Reason
from marserve.frontend.batching.jobs import Group, Job, JobQueue, Priority
from marserve.frontend.batching.options import Batching
from marserve.frontend.errors import Overloaded, WorkerDied

HIGH, NORMAL, LOW = Priority
EPSILON = 1e-6


class Runner:
    """Takes batches and notes when; idle again only when told."""

    def __init__(self, room: "Room", in_hand: int = 0) -> None:
        self.room = room
        self.in_hand = in_hand
        self.batches: list[Batch] = []
        room.batcher.enlist(self)

    @property
    def got(self) -> list[tuple[float, list[int]]]:
        return [(self.room.since(batch.closed), self.room.names(batch)) for batch in self.batches]

    def run(self, batch: Batch) -> None:
        self.batches.append(batch)

    def finish(self, seconds: float, *, succeeded: bool = True) -> None:
        """Answer the last batch, as if it had taken so long."""
        batch = self.batches[-1]
        if succeeded:
            batch.deliver([Prediction(b"")] * len(batch))
        else:
            batch.fail(WorkerDied())
        self.room.batcher.finished(batch, seconds, succeeded=succeeded)
        self.room.batcher.enlist(self)


class Room:
    """A batcher in virtual time; jobs are named by the order in which they come."""

    def __init__(self, fakes: ModuleType, loop: Any, batching: Batching) -> None:
        self.fakes, self.loop = fakes, loop
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
        given = self.fakes.make_input(id_=str(len(self.jobs)))
        future = self.loop.create_future()
        job = self.fakes.AwaitedJob(
            given, now, future, group, deadline=now + within, priority=priority
        )
        self.jobs.append(job)
        return job

    def put(self, count: int = 1, **job: Any) -> None:
        for _ in range(count):
            one = self.job(**job)
            self.batcher.admit(one)
            self.batcher.put(one)

    def idle(self, count: int = 1) -> list[Runner]:
        return [Runner(self) for _ in range(count)]

    def wait(self, seconds: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(seconds))


@pytest.fixture
def room(fakes: ModuleType, loop: Any) -> Callable[..., Room]:
    """A room with a batcher of these settings; by default a window of a second, four to a batch."""

    def make(policy: str = "fixed", **settings: Any) -> Room:
        settings = {"size": 4, "delay": 1.0, "queue_size": 1000, **settings}
        return Room(fakes, loop, Batching(policy=policy, **settings))

    return make


# -- the window, in time ---------------------------------------------------------------------------


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
    one.jobs[0].cancel()
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
    one.jobs[0].cancel()
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


def test_nothing_rings_while_nothing_is_held(room: Callable[..., Room]) -> None:
    one = room("greedy")
    timers = Timers()
    one.batcher = Batcher(one.queue, one.batcher.batching, timers, one.loop.time)
    one.put(3)
    one.idle(2)
    one.put(3)
    assert timers.open == 0


def test_nothing_rings_when_nobody_is_idle_any_more(room: Callable[..., Room]) -> None:
    one = room()
    timers = Timers()
    one.batcher = Batcher(one.queue, one.batcher.batching, timers, one.loop.time)
    first, second = one.idle(2)
    one.put()
    assert timers.open == 1
    one.batcher.withdraw(first)
    assert timers.open == 1
    one.batcher.withdraw(second)
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


def test_a_higher_class_goes_first_and_the_order_of_each_is_kept(
    room: Callable[..., Room],
) -> None:
    one = room("greedy", size=3)
    for priority in (LOW, NORMAL, HIGH, LOW, NORMAL, HIGH):
        one.put(priority=priority)
    first, second = one.idle(2)
    assert [first.got, second.got] == [[(0.0, [2, 5, 1])], [(0.0, [4, 0, 3])]]


@pytest.mark.parametrize(("policy", "most"), [("greedy", 2.0), ("adaptive", 2.0), ("fixed", 2.0)])
def test_a_low_class_is_served_while_a_high_one_keeps_coming(
    room: Callable[..., Room], policy: str, most: float
) -> None:
    one = room(policy, size=2, queue_size=8, delay=0.0)
    [runner] = one.idle()
    one.put(priority=LOW)
    one.put(priority=LOW)
    runner.finish(0.01)
    for _ in range(1000):
        one.put(one.queue.free_seats(HIGH), priority=HIGH)
        one.wait(0.01)
        runner.finish(0.01)
        if one.jobs[1].dispatched is not None:
            break
    # What a class may wait longer, twice; and then those seats that were taken before.
    assert one.loop.time() - one.began <= most + 8 / 2 * 0.01 + EPSILON


def test_with_adaptive_the_earliest_deadline_goes_first(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=2)
    one.batcher.seed([(1, 0.01), (2, 0.011)])
    for within in (0.9, 0.3, 0.5, 0.3):
        one.put(within=within)
    first, second = one.idle(2)
    assert [first.got, second.got] == [[(0.0, [1, 3])], [(0.0, [2, 0])]]


def test_each_class_has_its_own_seats(room: Callable[..., Room]) -> None:
    one = room(queue_size=2, seats={LOW: 1})
    one.put(2)
    one.put(priority=LOW)
    assert [one.queue.has_seat(priority) for priority in Priority] == [True, False, False]


def test_more_seats_than_asked_for_are_no_reason_to_wait(room: Callable[..., Room]) -> None:
    """A queue that is full closes a batch: nobody else could join."""
    one = room(size=8, queue_size=3)
    [runner] = one.idle()
    one.put(3)
    assert runner.got == [(0.0, [0, 1, 2])]


def test_those_of_one_request_leave_together(room: Callable[..., Room]) -> None:
    one = room("greedy", size=3)
    first, second = one.idle(2)
    one.batcher.put_together([one.job() for _ in range(5)])
    assert [first.got, second.got] == [[(0.0, [0, 1, 2])], [(0.0, [3, 4])]]


def test_those_of_one_request_are_let_in_all_or_none(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=4, max_latency=0.1)
    one.batcher.seed([(1, 0.04), (4, 0.09)])
    one.put(2)
    jobs = [one.job() for _ in range(99)]
    jobs[50].deadline = 0.0
    with pytest.raises(Overloaded):
        one.batcher.put_together(jobs)
    assert len(one.queue) == 2
    [runner] = one.idle()
    assert runner.got == [(0.0, [0, 1])]


def test_now_and_then_one_that_seems_hopeless_is_run_to_see_what_it_takes(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=4, max_latency=0.05)
    one.batcher.seed([(1, 10.0)])
    [runner] = one.idle()
    one.put()
    assert runner.got == [(0.0, [0])]
    with pytest.raises(Overloaded):  # while it runs
        one.put()
    runner.finish(10.0)
    with pytest.raises(Overloaded):
        one.put()
    one.wait(1.0)
    one.put()
    assert len(runner.got) == 2


def test_without_lessons_too_only_one_in_a_second_is_tried(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=4, max_latency=0.05)
    one.batcher.seed([(1, 10.0)])
    [runner] = one.idle()
    one.put()
    runner.finish(0.0, succeeded=False)
    one.wait(0.5)
    with pytest.raises(Overloaded):
        one.put()
    one.wait(0.5)
    one.put()
    assert len(runner.got) == 2


def test_a_quick_model_that_was_slow_for_a_moment_is_soon_itself_again(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=1, max_latency=0.005)
    one.batcher.seed([(1, 0.02)])  # the machine was busy; in truth it takes a tenth of that
    [runner] = one.idle()
    refused = 0
    for _ in range(1000):  # a thousand requests a second
        try:
            one.put()
        except Overloaded:
            refused += 1
        if not one.batcher.idle:
            runner.finish(0.002)
        one.wait(0.001)
    assert refused < 900
    one.put()


def test_a_list_that_seems_hopeless_is_tried_where_nothing_was_learnt_for_a_while(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=4, max_latency=0.1)
    one.batcher.seed([(1, 5.0), (4, 5.2)])  # a slow start; it is fast in truth
    [runner] = one.idle()

    def ask() -> list[Job]:
        jobs = [one.job() for _ in range(6)]
        one.batcher.put_together(jobs)
        while one.batcher.idle == 0:
            runner.finish(0.01)
        return jobs

    first = ask()
    assert runner.got[0] == (0.0, [0, 1, 2, 3])  # that much is found out; others are not in time
    assert isinstance(first[4].future.exception(), Overloaded)
    with pytest.raises(Overloaded):
        ask()
    assert len(one.queue) == 0
    for _ in range(5):
        one.wait(1.0)
        last = ask()
    assert all(job.future.result() for job in last)


# -- suspects --------------------------------------------------------------------------------------


def test_who_was_in_a_crash_runs_first_and_by_itself(room: Callable[..., Room]) -> None:
    one = room("greedy")
    [victim] = one.idle()
    one.put()
    one.put(2)
    one.batcher.withdraw(victim)
    [heir] = one.idle()
    assert heir.got == [(0.0, [1, 2])]
    for job in one.jobs:
        job.crashes = 1
    one.put(2)
    one.batcher.bring_back(one.jobs[:3])
    runners = one.idle(4)
    assert [runner.got for runner in runners] == [
        [(0.0, [0])],
        [(0.0, [1])],
        [(0.0, [2])],
        [(0.0, [3, 4])],
    ]
    assert [runner.batches[0].reason for runner in runners[:3]] == [Reason.ALONE] * 3


def test_a_suspect_does_not_wait_for_a_window(room: Callable[..., Room]) -> None:
    one = room()
    first, second = one.idle(2)
    one.put(4)
    one.put()
    one.wait(0.5)
    one.batcher.withdraw(first)
    one.jobs[0].crashes = 1
    one.batcher.bring_back(one.jobs[:1])
    assert second.got == [(0.5, [0])]
    [third] = one.idle()
    one.wait(1.0)
    assert third.got == [(1.0, [4])]


# -- the crew --------------------------------------------------------------------------------------


def crew_of(one: Room) -> tuple[int, int, int]:
    crew = one.batcher._crew
    assert crew.idle == one.batcher.idle
    return crew.idle, len(crew.busy), crew.in_flight


def test_the_crew_is_known_at_any_time(room: Callable[..., Room]) -> None:
    one = room("greedy")
    assert crew_of(one) == (0, 0, 0)
    first, second = one.idle(2)
    assert crew_of(one) == (2, 0, 0)
    one.put()
    assert crew_of(one) == (1, 1, 1)
    one.batcher.put_together([one.job() for _ in range(3)])
    assert crew_of(one) == (0, 2, 4)
    second.finish(0.01)
    assert crew_of(one) == (1, 1, 1)
    one.batcher.withdraw(first)  # in the middle of its batch
    one.batcher.withdraw(first)
    assert crew_of(one) == (1, 0, 0)
    one.batcher.withdraw(second)
    assert crew_of(one) == (0, 0, 0)


def test_a_worker_that_takes_a_failed_batch_apart_is_known_to_be_busy_with_a_part(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=4)
    one.batcher.seed([(1, 0.010), (4, 0.040)])
    one.put(4)
    [runner] = one.idle()
    one.wait(0.05)
    late = one.loop.time()
    one.batcher.admit(one.job(within=0.03))  # any moment now
    part = Batch(runner.batches[0].jobs[:2], late, Reason.ISOLATION, 2, 0.025)
    one.batcher.goes_on(runner, part)
    assert crew_of(one) == (0, 1, 2)
    with pytest.raises(Overloaded):
        one.batcher.admit(one.job(within=0.03))
    one.batcher.admit(one.job(within=0.05))
    one.batcher.withdraw(runner)
    one.batcher.goes_on(runner, part)
    assert crew_of(one) == (0, 0, 0)


# -- what is learnt, and told ----------------------------------------------------------------------


def test_a_batch_is_recorded_with_what_it_was_to_cost_and_did(room: Callable[..., Room]) -> None:
    one = room()
    one.batcher.seed([(1, 0.01), (2, 0.02), (4, 0.04)])
    one.put()
    one.wait(0.4)
    [runner] = one.idle()
    one.put(priority=HIGH)
    one.wait(1.0)
    runner.finish(0.03)
    [document] = one.batcher.history.as_documents()
    del document["closedAt"]
    assert document == {
        "size": 2,
        "ranAs": 2,
        "reason": "window",
        "oldestWaitedMs": 1000.0,
        "heldMs": 600.0,
        "predictedMs": 20.0,
        "tookMs": 30.0,
        "succeeded": True,
    }


def test_only_the_batch_that_was_held_is_said_to_have_been(room: Callable[..., Room]) -> None:
    one = room(size=2, delay=1.0)
    runners = one.idle(2)
    one.put()
    one.wait(0.5)
    one.batcher.put_together([one.job() for _ in range(3)])
    assert [runner.batches[0].held for runner in runners] == [pytest.approx(0.5), 0.0]


def test_a_batch_was_not_held_before_its_first_request_came(room: Callable[..., Room]) -> None:
    one = room()
    [runner] = one.idle()
    one.put()
    one.wait(0.1)
    one.jobs[0].cancel()
    one.queue.discard(one.jobs[0])
    one.wait(0.4)
    one.put()
    one.wait(1.0)
    [batch] = runner.batches
    assert (batch.waited, batch.held) == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize(
    ("group", "succeeded"), [(Group.EXPLAIN, True), (Group.DESCRIBE, True), (Group.PREDICT, False)]
)
def test_only_predictions_that_succeeded_teach_what_a_prediction_costs(
    room: Callable[..., Room], group: Group, succeeded: bool
) -> None:
    one = room("greedy")
    [runner] = one.idle()
    one.put(group=group)
    runner.finish(9.0, succeeded=succeeded)
    assert not one.batcher.costs.is_known
    assert len(one.batcher.history) == 1


def test_while_too_many_are_late_estimates_become_more_careful(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=1, max_latency=0.1)
    [runner] = one.idle()
    before = one.batcher.costs.margin
    one.batcher.seed([(1, 0.01)])
    for number in range(30):
        one.put()
        runner.finish(0.2 if number % 10 == 9 else 0.01)
    assert one.batcher.costs.margin > before
    for _ in range(4000):
        one.put()
        runner.finish(0.01)
    assert one.batcher.costs.margin == before


# -- refusals --------------------------------------------------------------------------------------


def test_who_cannot_be_answered_in_time_hears_when_to_try_again(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=1)
    one.batcher.seed([(1, 3.0)])
    one.idle()
    one.put(within=9.0)
    with pytest.raises(Overloaded) as refused:
        one.put(within=5.0)
    assert 6 <= refused.value.retry_after <= 8
    assert len(one.queue) == 0


def test_a_question_about_the_model_has_no_latency_goal(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=1, max_latency=0.05)
    one.batcher.seed([(1, 0.04)])
    one.put()
    with pytest.raises(Overloaded):
        one.put()
    one.put(group=Group.DESCRIBE)
    one.wait(0.1)
    [runner] = one.idle()
    assert [one.names(batch) for batch in runner.batches] == [[2]]


def test_who_is_shed_is_answered_and_hears_when_to_try_again(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=2)
    one.batcher.seed([(1, 0.01), (2, 0.012)])
    one.put(within=0.02)
    one.put(within=9.0)
    one.wait(0.5)
    [runner] = one.idle()
    assert runner.got == [(0.5, [1])]
    error = one.jobs[0].future.exception()
    assert isinstance(error, Overloaded)
    assert error.retry_after == 1


def test_who_has_left_is_not_counted_among_those_that_are_shed(room: Callable[..., Room]) -> None:
    one = room("adaptive", size=2)
    one.batcher.seed([(1, 0.01), (2, 0.012)])
    one.put(2, within=0.05)
    one.put(group=Group.EXPLAIN, within=0.05)
    one.put(within=9.0)
    one.jobs[0].cancel()
    one.wait(0.5)
    [runner] = one.idle()
    assert runner.got == [(0.5, [3])]
    assert all(isinstance(job.future.exception(), Overloaded) for job in one.jobs[1:3])


def test_a_more_urgent_request_ends_a_hold_that_it_could_not_bear(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=8, delay=10.0)
    one.batcher.seed((size, 0.02 + 0.0005 * size) for size in (1, 2, 4, 8))
    last = one.idle(4)[-1]
    one.put(3)  # the others are busy from now on
    for _ in range(500):  # of a load that is worth a hold
        one.put()
        one.wait(1 / 500)
        if last.batches and not last.batches[-1].jobs[0].future.done():
            last.finish(0.02 + 0.0005 * len(last.batches[-1]))
    while not one.queue:
        one.put()
    one.put(within=0.024)
    urgent = one.jobs[-1]
    one.wait(0.002)
    assert urgent.dispatched is not None
    assert urgent.dispatched - urgent.arrived <= 0.0025


def test_a_member_who_would_be_late_is_refused_though_the_first_is_not(
    room: Callable[..., Room],
) -> None:
    """Two take 20 ms; the first by class is not the first by deadline."""
    one = room("adaptive", size=2, max_latency=0.1)
    one.batcher.seed([(1, 0.010), (2, 0.020)])
    one.put(priority=HIGH, within=0.05)
    one.put(priority=LOW, within=0.015)
    [runner] = one.idle()
    assert runner.got == [(0.0, [0])]
    assert isinstance(one.jobs[1].future.exception(), Overloaded)
    assert len(one.queue) == 0


def test_whether_a_member_would_be_late_is_seen_by_the_rows_that_run(
    room: Callable[..., Room],
) -> None:
    """Two run as four, which take 30 ms; two would take 17."""
    one = room("adaptive", size=4, max_latency=0.1, compiled_sizes=(1, 4))
    one.batcher.seed([(1, 0.010), (4, 0.030)])
    one.put(priority=HIGH, within=0.05)
    one.put(priority=LOW, within=0.020)
    [runner] = one.idle()
    assert runner.got == [(0.0, [0])]
    assert isinstance(one.jobs[1].future.exception(), Overloaded)


@pytest.mark.parametrize("policy", ["fixed", "greedy", "fixed_or_single"])
def test_other_policies_refuse_nobody_for_lateness(room: Callable[..., Room], policy: str) -> None:
    one = room(policy, size=2)
    one.batcher.seed([(1, 0.010), (2, 0.020)])
    one.put(2, within=0.015)
    [runner] = one.idle()
    assert runner.got == [(0.0, [0, 1])]


# -- clients that come back ------------------------------------------------------------------------


def test_one_worker_waits_a_moment_for_the_clients_it_has_answered(
    room: Callable[..., Room],
) -> None:
    one = room("adaptive", size=8, num_requests=3)
    one.batcher.seed((size, 0.010) for size in (1, 2, 4))
    [runner] = one.idle()
    one.wait(1.0)
    one.put()
    one.put(2)
    assert runner.got == [(1.0, [0])]  # they had all the time
    one.wait(0.010)
    runner.finish(0.010)
    one.wait(0.002)
    assert len(runner.got) == 1
    one.put()
    assert runner.got[1:] == [(1.012, [1, 2, 3])]
    assert runner.batches[-1].reason is Reason.FULL
    one.wait(0.010)
    runner.finish(0.010)
    one.put()
    one.wait(0.1)
    assert runner.got[2:] == [(pytest.approx(1.027), [4])]


@pytest.mark.parametrize("compiled_sizes", [(), (1, 2, 4, 8)])
def test_clients_that_keep_coming_back_travel_together_though_nobody_told_their_number(
    room: Callable[..., Room], compiled_sizes: tuple[int, ...]
) -> None:
    one = room("adaptive", size=8, compiled_sizes=compiled_sizes)
    one.batcher.seed((size, 0.02) for size in (1, 2, 4, 8))
    [runner] = one.idle()
    one.batcher.put_together([one.job() for _ in range(4)])
    for _ in range(40):
        one.wait(0.02)
        runner.finish(0.02)
        for _ in range(4):
            one.wait(0.0001)
            one.put()
    assert len(runner.batches[1]) == 1  # not known yet
    assert [len(batch) for batch in runner.batches[-9:]] == [4] * 9


# -- a window and a deadline -----------------------------------------------------------------------


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(
    ("within", "leaves"), [(math.inf, 1.0), (9.0, 1.0), (0.5, 0.1 + 0.5 - 0.2)]
)
def test_a_window_that_is_open_closes_early_for_one_who_comes_with_a_deadline(
    room: Callable[..., Room], within: float, leaves: float, together: bool
) -> None:
    one = room(size=8)
    one.batcher.seed([(1, 0.2)])
    for _ in range(300):
        one.batcher.costs.observe(1, 0.2)  # a bound of hardly more
    [runner] = one.idle()
    one.put()
    one.wait(0.1)
    if together:
        one.batcher.put_together([one.job(within=within)])
    else:
        one.put(within=within)
    one.wait(2.0)
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
def test_a_change_holds_for_those_who_wait_already(
    room: Callable[..., Room], changes: dict[str, Any], leaves: float
) -> None:
    one = room()
    [runner] = one.idle()
    one.put(2)
    one.wait(0.5)
    one.batcher.reconfigure(replace(one.batcher.batching, **changes))
    one.wait(5.0)
    assert runner.got == [(pytest.approx(leaves), [0, 1])]


def test_a_change_holds_for_the_next_batch_not_for_one_on_its_way(
    room: Callable[..., Room],
) -> None:
    one = room("greedy", size=4)
    [runner] = one.idle()
    one.put(5)
    one.batcher.reconfigure(replace(one.batcher.batching, size=2))
    runner.finish(0.01)
    runner.finish(0.01)
    assert [names for _, names in runner.got] == [[0], [1, 2], [3, 4]]


@pytest.mark.parametrize(("before", "after"), [("adaptive", "greedy"), ("greedy", "adaptive")])
def test_who_came_before_a_change_leaves_before_those_who_came_after(
    room: Callable[..., Room], before: str, after: str
) -> None:
    one = room(before, size=2)
    one.put(2)
    one.batcher.reconfigure(replace(one.batcher.batching, policy=after))
    one.put(2)
    one.put(priority=HIGH)
    first, second = one.idle(2)
    assert [first.got, second.got] == [[(0.0, [4, 0])], [(0.0, [1, 2])]]


def test_seats_change_too(room: Callable[..., Room]) -> None:
    one = room(queue_size=3)
    one.put(3)
    one.batcher.reconfigure(replace(one.batcher.batching, queue_size=2, seats={HIGH: 1}))
    assert [one.queue.free_seats(priority) for priority in Priority] == [1, 0, 2]
    assert len(one.queue) == 3


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"max_latency": 0.1}, 5, 10_000),
        ({"max_latency": 0.1, "is_queue_bounded": True}, 5, 5),
        ({}, 5, 5),
        ({"max_latency": 0.1, "seats": {NORMAL: 7}}, 7, 7),
    ],
)
def test_once_costs_are_known_refusals_bound_the_queue_of_a_model_with_a_goal(
    room: Callable[..., Room], settings: dict[str, Any], before: int, after: int
) -> None:
    one = room("adaptive", **{"queue_size": 5, "is_queue_bounded": False, **settings})
    assert one.queue.free_seats(NORMAL) == before
    one.batcher.seed([(1, 0.01)])
    assert one.queue.free_seats(NORMAL) == after
    assert one.batcher.size == 4


# -- sizes -----------------------------------------------------------------------------------------


def test_compiled_sizes_are_run_and_the_rest_is_padding(room: Callable[..., Room]) -> None:
    one = room("greedy", size=8, compiled_sizes=(2, 8))
    one.put(3)
    one.put()
    one.put(group=Group.EXPLAIN)
    one.put(group=Group.DESCRIBE)
    one.jobs[0].cancel()
    one.jobs[1].cancel()
    runners = one.idle(3)
    ran = [(len(runner.batches[0]), runner.batches[0].run_as) for runner in runners]
    assert ran == [(2, 2), (1, 2), (1, 1)]


def test_a_suspect_runs_as_a_compiled_size_too(room: Callable[..., Room]) -> None:
    one = room("greedy", size=4, compiled_sizes=(4,))
    suspect = one.job()
    suspect.crashes = 1
    one.batcher.bring_back([suspect])
    [runner] = one.idle()
    assert runner.batches[0].run_as == 4


LESSON = 0.0021  # costs are learnt from a batch every two milliseconds


def kinked(rows: int) -> float:
    """Up to eight at a time cost hardly more than one; beyond that each costs as if alone."""
    return 0.01 + 0.0001 * min(rows, 8) + 0.0013 * max(0, rows - 8)


def teach(one: Room, runner: Runner, batches: int, *sizes: int) -> None:
    for number in range(batches):
        one.batcher.put_together([one.job() for _ in range(sizes[number % len(sizes)])])
        runner.finish(kinked(runner.batches[-1].run_as))
        one.wait(LESSON)


def test_batches_in_quick_succession_do_not_all_teach(room: Callable[..., Room]) -> None:
    one = room("greedy", size=1)
    [runner] = one.idle()
    for _ in range(100):
        one.put()
        runner.finish(0.0001)
        one.wait(LESSON / 10)
    assert 9 <= one.batcher.costs.samples <= 11


def test_an_automatic_size_grows_with_traffic_until_the_best_is_seen(
    room: Callable[..., Room],
) -> None:
    one = room("greedy", size=128, is_automatic=True)
    [runner] = one.idle()
    assert (one.batcher.size, one.batcher.choice) == (128, None)
    teach(one, runner, 100, 1, 2, 4)
    assert (one.batcher.size, one.batcher.choice) == (128, None)
    teach(one, runner, 100, 1, 8)
    assert (one.batcher.size, one.batcher.choice) == (128, None)
    teach(one, runner, 100, 1, 8, 16, 32)
    assert one.batcher.size == 8
    assert one.batcher.choice is not None
    assert "times the throughput" in one.batcher.choice.why


@pytest.mark.parametrize("compiled_sizes", [(), (1, 8, 32)])
def test_an_automatic_size_is_not_chosen_by_sizes_that_ran_a_few_times_only(
    room: Callable[..., Room], compiled_sizes: tuple[int, ...]
) -> None:
    """Eight are the best that was seen; that there is nothing better takes five larger batches."""
    settings = {"is_automatic": True, "compiled_sizes": compiled_sizes}
    one = room("greedy", size=32, **settings)
    [runner] = one.idle()
    teach(one, runner, 96, 1, 8)
    teach(one, runner, 4, 32)
    assert one.batcher.costs.samples == 100
    assert (one.batcher.size, one.batcher.choice) == (32, None)
    teach(one, runner, 99, 1, 8)
    teach(one, runner, 1, 32)
    assert one.batcher.size == 8


def test_after_a_sweep_a_size_that_ran_once_is_not_chosen(room: Callable[..., Room]) -> None:
    one = room("greedy", size=128, is_automatic=True)
    one.batcher.seed((size, kinked(size)) for size in (1, 2, 4, 8, 16))
    [runner] = one.idle()
    teach(one, runner, 1, 100)
    one.batcher.costs.observe(100, 0.001)
    one.batcher.seed([])  # to look again
    assert one.batcher.size == 8


def test_an_automatic_size_is_known_after_a_sweep(room: Callable[..., Room]) -> None:
    one = room("greedy", size=128, is_automatic=True)
    one.batcher.seed((size, kinked(size)) for size in (1, 2, 4, 8))
    assert one.batcher.size == 8
    one.batcher.reconfigure(replace(one.batcher.batching, is_automatic=False, size=16))
    assert (one.batcher.size, one.batcher.choice) == (16, None)


def test_an_automatic_size_is_not_chosen_from_compiled_ones_that_never_ran(
    room: Callable[..., Room],
) -> None:
    one = room("greedy", size=8, is_automatic=True, compiled_sizes=(1, 4, 8))
    [runner] = one.idle()
    teach(one, runner, 100, 1)
    assert (one.batcher.size, one.batcher.choice) == (8, None)
    one.batcher.seed((size, 0.01 * size) for size in (1, 4, 8))
    assert one.batcher.size == 1


@pytest.mark.parametrize(("policy", "size"), [("adaptive", 8), ("greedy", 16)])
def test_with_adaptive_no_batch_is_so_large_that_it_only_becomes_slower(
    room: Callable[..., Room], policy: str, size: int
) -> None:
    one = room(policy, size=16)
    one.batcher.seed((rows, 0.01 * (1 if rows <= 8 else rows)) for rows in (1, 2, 4, 8, 16))
    assert (one.batcher.size, one.batcher.choice) == (size, None)


def test_an_automatic_size_may_be_found_among_compiled_ones_above_one(
    room: Callable[..., Room],
) -> None:
    one = room("greedy", size=32, is_automatic=True, compiled_sizes=(4, 8, 32))
    one.batcher.seed((rows, 0.01 if rows <= 8 else 0.05) for rows in (4, 8, 32))
    assert one.batcher.size == 8


def test_an_automatic_size_is_one_where_batching_does_not_pay(room: Callable[..., Room]) -> None:
    one = room("greedy", size=128, is_automatic=True)
    one.batcher.seed((size, 0.01 * size) for size in (1, 2, 4, 8))
    assert one.batcher.size == 1
    assert one.batcher.choice is not None
    assert "does not pay" in one.batcher.choice.why


def test_a_size_that_did_not_fit_into_memory_is_not_tried_again_for_a_while(
    room: Callable[..., Room],
) -> None:
    one = room("greedy", size=8)
    one.batcher.out_of_memory(8)
    assert one.batcher.size == 4
    assert "memory" in one.batcher.why
    [runner] = one.idle()
    one.wait(601.0)
    teach(one, runner, 100, 1)
    assert one.batcher.size == 5
    one.batcher.reconfigure(replace(one.batcher.batching, size=16))
    assert (one.batcher.size, one.batcher.why) == (16, "")


def test_the_time_in_which_answers_go_out_is_learnt_for_those_with_a_goal(
    room: Callable[..., Room],
) -> None:
    def bound(handing_over: float) -> float:
        one = room("adaptive", size=8, max_latency=1.0)
        one.batcher.seed([(1, 0.01), (8, 0.02)])
        [runner] = one.idle()
        for _ in range(100):
            one.put()
            one.wait(0.01)
            runner.finish(0.01)
            one.batcher.handed_over(one.loop.time() + handing_over)
            one.wait(0.01)
        return one.batcher.costs.bound(8)

    assert bound(0.003) == pytest.approx(bound(0.0) + 0.003, rel=0.01)


@pytest.mark.parametrize("seats", [50, 1000])
def test_a_size_that_is_not_found_yet_is_told_as_such(
    room: Callable[..., Room], seats: int
) -> None:
    one = room("greedy", size=128, is_automatic=True, queue_size=seats)
    assert (one.batcher.size, one.batcher.why) == (min(128, seats), "learning")


# -- workers with several batches ------------------------------------------------------------------


def test_whoever_has_least_in_hand_is_served_first(room: Callable[..., Room]) -> None:
    one = room("greedy")
    runners = [Runner(one, in_hand) for in_hand in (2, 0, 1, 0)]
    one.batcher.serve_least_in_hand_first()
    one.batcher.serve_least_in_hand_first()
    runners[0].in_hand = 1
    for _ in range(4):
        one.put()
    assert [runner.got for runner in runners] == [
        [(0.0, [2])],
        [(0.0, [0])],
        [(0.0, [3])],
        [(0.0, [1])],
    ]


def test_a_worker_that_asks_before_it_is_done_is_looked_at_again_when_it_is(
    room: Callable[..., Room],
) -> None:
    """What waits for company beside a busy worker leaves when that is idle: nobody else comes."""
    one = room("adaptive", size=16)
    one.batcher.seed([(1, 1.0), (16, 1.2)])
    [first] = one.idle()
    one.put(17)  # so many at once: single requests would be more than the worker can do
    [second], [asking] = one.idle(), one.idle()
    one.put()
    for busy in (first, second):
        assert (len(busy.batches), len(asking.batches)) == (1, 0)
        one.batcher.answered(busy)
    assert len(asking.batches) == 1


def test_a_batch_that_is_answered_is_in_no_hand_any_more(room: Callable[..., Room]) -> None:
    one = room(num_requests=2)
    first, second = one.idle(2)
    one.put()
    one.wait(1.0)
    one.batcher.answered(first)
    one.put()
    assert second.got == []
    one.wait(1.0)
    assert second.got == [(2.0, [1])]
