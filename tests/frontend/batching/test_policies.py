import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.jobs import Job, Priority
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.policies import (
    FixedOrSingle,
    FixedWindow,
    Greedy,
    Plan,
    WorkerPoolState,
)

IDLE = WorkerPoolState(1)
HIGH, NORMAL, LOW = Priority

seconds = st.floats(0, 1e9)


class Queue:
    """Jobs that have arrived at one moment; one of them may have a deadline."""

    def __init__(self, queued: int, oldest_arrival: float, deadline: float = math.inf) -> None:
        self.queued = queued
        self.oldest_arrival = oldest_arrival
        self.earliest_deadline = deadline

    def __len__(self) -> int:
        return self.queued

    @property
    def sharing_count(self) -> int:
        return self.queued

    def deadline_at(self, index: int) -> float:
        return math.inf


def busy_with(*jobs: int) -> WorkerPoolState:
    return WorkerPoolState(1, busy={worker: (0.0, count) for worker, count in enumerate(jobs)})


# -- the fixed window ------------------------------------------------------------------------------


@pytest.mark.parametrize("queued", [4, 5, 400])
def test_a_full_batch_leaves_at_once_and_no_more_than_a_batch(queued):
    assert FixedWindow(4, 10.0).plan(0.0, Queue(queued, 0.0), IDLE) == Plan(4, Reason.FULL)


@pytest.mark.parametrize(("now", "take"), [(5.0, 0), (5.9, 0), (6.0, 3), (7.0, 3)])
def test_the_window_is_counted_from_the_oldest_arrival(now, take):
    plan = FixedWindow(4, 1.0).plan(now, Queue(3, 5.0), IDLE)
    assert (plan.take, plan.reason) == (take, Reason.WINDOW)


class RowJob(Job):
    is_row_of_list = True


@pytest.mark.parametrize("rows", [2, 3])
def test_a_list_of_a_client_closes_the_window(make_queue, rows):
    queue = make_queue(1, arrived=5.0)
    assert FixedWindow(8, 1.0, lists_close=True).plan(5.0, queue, IDLE).take == 0
    for _ in range(rows):
        queue.append(RowJob(queue.first.input, 5.0, None))
    plan = FixedWindow(8, 1.0, lists_close=True).plan(5.0, queue, IDLE)
    assert (plan.take, plan.reason) == (1 + rows, Reason.LIST)
    assert FixedWindow(1 + rows, 1.0, lists_close=True).plan(5.0, queue, IDLE).reason is Reason.FULL
    assert FixedWindow(8, 1.0).plan(5.0, queue, IDLE).take == 0
    assert FixedOrSingle(8, 1.0).plan(5.0, queue, IDLE).take == 0


def test_who_waits_does_so_until_a_moment_or_a_number():
    plan = FixedWindow(4, 1.0).plan(5.5, Queue(3, 5.0), IDLE)
    assert (plan.take, plan.until, plan.full) == (0, 6.0, 4)


@pytest.mark.parametrize(("queued", "take"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_a_delay_of_zero_takes_what_is_there(queued, take):
    assert FixedWindow(4, 0.0).plan(5.0, Queue(queued, 5.0), IDLE).take == take


@pytest.mark.parametrize(
    ("queued", "in_flight", "full"),
    [(2, 0, 3), (1, 1, 2), (1, 0, 3), (1, 2, None), (3, 0, None), (1, 9, None)],
)
def test_nobody_waits_for_more_requests_than_there_are(queued, in_flight, full):
    policy = FixedWindow(8, 1.0, num_requests=3)
    plan = policy.plan(0.5, Queue(queued, 0.0), busy_with(in_flight))
    if full is None:
        assert plan == Plan(queued, Reason.NO_MORE_CLIENTS)
    else:
        assert (plan.take, plan.full) == (0, full)


ONE_TAKES = 0.25


def known() -> LatencyModel:
    """A single request takes a quarter of a second, to a hair."""
    costs = LatencyModel()
    for _ in range(200):
        costs.observe(1, ONE_TAKES)
    return costs


@pytest.mark.parametrize("make", [FixedWindow, FixedOrSingle])
@pytest.mark.parametrize(
    ("deadline", "closes"),
    [(math.inf, 6.0), (9.0, 6.0), (5.9, 5.9 - ONE_TAKES), (5.3, 5.3 - ONE_TAKES)],
)
def test_the_window_closes_early_for_whoever_would_be_late(make, deadline, closes):
    policy = make(4, 1.0, costs=known())
    queue = Queue(2, 5.0, deadline)
    plan = policy.plan(5.0, queue, IDLE)
    assert (plan.take, plan.full) == (0, 4)
    assert plan.until == pytest.approx(closes, abs=0.1 * ONE_TAKES)
    assert plan.until <= closes
    assert policy.plan(plan.until - 1e-6, queue, IDLE).take == 0
    assert policy.plan(plan.until, queue, IDLE).take == (2 if make is FixedWindow else 1)


def test_while_costs_are_unknown_the_window_closes_with_the_deadline():
    assert FixedWindow(4, 1.0).plan(5.0, Queue(2, 5.0, 5.5), IDLE).until == 5.5


@given(st.integers(1, 64), st.floats(0, 100), seconds, st.integers(1, 1000), seconds)
def test_whatever_happens_size_and_window_are_kept(size, delay, now, queued, oldest):
    plan = FixedWindow(size, delay).plan(now, Queue(queued, oldest), IDLE)
    assert plan.take <= min(size, queued)
    if plan.take:
        assert plan.take == size or now >= oldest + delay
    else:
        assert now < plan.until == oldest + delay
        assert queued < plan.full == size


# -- greedy ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queued", "plan"),
    [
        (1, Plan(1, Reason.WORK_CONSERVING)),
        (3, Plan(3, Reason.WORK_CONSERVING)),
        (4, Plan(4, Reason.FULL)),
        (9, Plan(4, Reason.FULL)),
    ],
)
def test_the_greedy_takes_what_is_queued(queued, plan):
    assert Greedy(4).plan(0.0, Queue(queued, 0.0), IDLE) == plan


# -- fixed, or each alone --------------------------------------------------------------------------


def test_a_full_batch_leaves_at_once_even_late():
    assert FixedOrSingle(4, 1.0).plan(9.0, Queue(4, 0.0), IDLE) == Plan(4, Reason.FULL)


def test_on_timeout_each_leaves_alone_and_who_came_later_has_a_window_again():
    policy = FixedOrSingle(4, 1.0)
    assert policy.plan(5.9, Queue(3, 5.0), IDLE).take == 0
    assert policy.plan(6.0, Queue(3, 5.0), IDLE) == Plan(1, Reason.SINGLE)
    # Arrived within the window that is over.
    assert policy.plan(6.1, Queue(2, 5.4), IDLE) == Plan(1, Reason.SINGLE)
    assert policy.plan(6.2, Queue(1, 6.0), IDLE) == Plan(1, Reason.SINGLE)
    plan = policy.plan(6.5, Queue(1, 6.4), IDLE)
    assert (plan.take, plan.until, plan.full) == (0, 7.4, 4)


def test_those_left_of_a_window_that_is_over_may_still_fill_a_batch():
    policy = FixedOrSingle(4, 1.0)
    policy.plan(6.0, Queue(3, 5.0), IDLE)
    assert policy.plan(6.1, Queue(4, 5.4), IDLE) == Plan(4, Reason.FULL)


def test_without_delay_each_leaves_alone():
    policy = FixedOrSingle(4, 0.0)
    assert policy.plan(5.0, Queue(1, 5.0), IDLE) == Plan(1, Reason.SINGLE)
    assert policy.plan(5.1, Queue(3, 5.1), IDLE) == Plan(1, Reason.SINGLE)


def test_each_leaves_alone_too_where_nobody_else_could_come():
    policy = FixedOrSingle(4, 1.0, num_requests=4)
    workers = busy_with(2)
    assert policy.plan(0.5, Queue(1, 0.0), workers).take == 0
    assert policy.plan(0.6, Queue(2, 0.0), workers) == Plan(1, Reason.SINGLE)
    assert policy.plan(0.6, Queue(1, 0.6), busy_with(1)) == Plan(1, Reason.SINGLE)


# -- order and admission ---------------------------------------------------------------------------

FIRST_COME = [FixedWindow(4, 1.0), FixedOrSingle(4, 1.0), Greedy(4)]


@pytest.mark.parametrize("policy", FIRST_COME, ids=lambda policy: type(policy).__name__)
def test_first_come_first_served_within_a_class_whatever_the_deadline(policy):
    assert policy.order(1.0, 9.0, NORMAL) < policy.order(1.1, 2.0, NORMAL)
    assert policy.order(1.0, 9.0, LOW) == policy.order(1.0, math.inf, LOW)


@pytest.mark.parametrize("policy", FIRST_COME, ids=lambda policy: type(policy).__name__)
def test_a_class_goes_before_a_lower_one_for_a_while_and_not_for_ever(policy):
    for higher, lower in ((HIGH, NORMAL), (NORMAL, LOW)):
        waiting = policy.order(5.0, math.inf, lower)
        assert policy.order(5.9, math.inf, higher) < waiting
        assert policy.order(6.1, math.inf, higher) > waiting


@pytest.mark.parametrize("policy", FIRST_COME, ids=lambda policy: type(policy).__name__)
def test_without_a_goal_nobody_is_refused(policy):
    assert policy.admit(5.0, 1.0, Queue(9999, 0.0), busy_with(9)) is None


# -- the workers -----------------------------------------------------------------------------------


def test_the_workers_can_be_counted():
    workers = WorkerPoolState(2, busy={"a": (7.0, 3), "b": (6.0, 1)})
    assert (workers.size, workers.in_flight) == (4, 4)
    assert workers.seconds_until_idle(5.0) == 0.0


@pytest.mark.parametrize(
    ("busy", "now", "until"),
    [
        ({}, 5.0, 0.0),
        ({"a": (7.0, 3), "b": (6.0, 9)}, 5.0, 1.0),
        ({"a": (7.0, 3)}, 8.0, 0.0),
    ],
)
def test_without_an_idle_worker_the_first_to_be_done_is_next(busy, now, until):
    assert WorkerPoolState(0, busy=busy).seconds_until_idle(now) == until
