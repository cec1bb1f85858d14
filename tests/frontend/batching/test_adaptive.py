import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.adaptive import Adaptive
from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Priority
from marserve.frontend.batching.policies import MAX_SHED, Plan, WorkerPoolState

HIGH, NORMAL, LOW = Priority
IDLE = WorkerPoolState(1)
SEVERAL = WorkerPoolState(4)
# One of four, the others of which have a request each.
LAST = WorkerPoolState(1, busy=dict.fromkeys("abc", (0.01, 1)))


@dataclass
class Costs:
    """A batch takes 9 ms, and 1 ms for each of its items, by default; never any noise."""

    per_item: float = 0.001
    per_batch: float = 0.009
    is_known: bool = True
    deviation: float = 0.0

    def mean(self, size: float) -> float:
        return self.per_batch + self.per_item * size

    bound = until_answered = mean


FLAT = Costs(0.0005, 0.020)


def policy(size: int = 8, costs: Costs | None = None, **options: Any) -> Adaptive:
    return Adaptive(size, costs or Costs(), **options)


# -- who is let in ---------------------------------------------------------------------------------


def arrive(adaptive: Adaptive, now: float) -> None:
    """A job without a deadline arrives."""
    assert adaptive.admit(now, math.inf, JobQueue(1), IDLE) is None


def admitted(wait: float | None) -> bool:
    return wait is None


def test_while_costs_are_unknown_nobody_is_refused_and_all_are_taken(make_queue):
    adaptive = policy(costs=Costs(is_known=False))
    assert adaptive.admit(5.0, 4.0, make_queue(99), IDLE) is None
    assert adaptive.plan(5.0, make_queue([0.0] * 3), SEVERAL) == Plan(3, Reason.WORK_CONSERVING)
    assert adaptive.plan(5.0, make_queue([0.0] * 9), SEVERAL) == Plan(8, Reason.FULL)


def test_without_a_deadline_nobody_is_refused(make_queue):
    crowded = WorkerPoolState(0, busy={"a": (99.0, 8)})
    assert policy().admit(0.0, math.inf, make_queue(1000), crowded) is None


@pytest.mark.parametrize(
    ("workers", "wait"),
    [
        (IDLE, 0.010),
        (WorkerPoolState(0, busy={"a": (5.030, 8)}), 0.040),
        (WorkerPoolState(0, busy={"a": (5.030, 8), "b": (5.020, 1)}), 0.030),
        # Late already: any moment now.
        (WorkerPoolState(0, busy={"a": (4.0, 8)}), 0.010),
    ],
)
def test_who_can_be_answered_in_time_is_let_in_and_others_hear_for_how_long(
    make_queue, workers, wait
):
    adaptive = policy()
    adaptive.admit(5.0, 5.0, make_queue(0), IDLE)  # one is let in to see what it takes
    refused = adaptive.admit(5.0, 5.0 + wait - 1e-6, make_queue(0), workers)
    assert refused == pytest.approx(wait)
    assert adaptive.admit(5.0, 5.0 + wait + 1e-6, make_queue(0), workers) is None


def test_those_ahead_are_no_reason_to_refuse_one(make_queue):
    """The first of them will be refused in its place, if there are too many."""
    queue = make_queue([5.03] * 400)
    assert policy().admit(5.0, 5.011, queue, IDLE) is None


# -- in which order --------------------------------------------------------------------------------


def test_the_earliest_deadline_goes_first():
    adaptive = policy(goal=0.1)
    assert adaptive.order(1.0, 1.05, NORMAL) < adaptive.order(0.99, 1.06, NORMAL)
    assert adaptive.order(1.0, 1.1, NORMAL) == adaptive.order(1.0, math.inf, NORMAL)


def test_without_a_goal_those_without_a_deadline_do_not_wait_for_ever():
    adaptive = policy()
    assert adaptive.order(1.0, math.inf, NORMAL) < adaptive.order(3.0, 3.5, NORMAL)
    assert adaptive.order(1.0, math.inf, NORMAL) < adaptive.order(1.1, math.inf, NORMAL)
    # A job with a distant deadline leaves no later than one without a deadline.
    assert adaptive.order(1.0, 99.0, NORMAL) == adaptive.order(1.0, math.inf, NORMAL)


@pytest.mark.parametrize(("goal", "aging"), [(0.1, 0.1 / 3), (6.0, 2.0), (math.inf, 1.0)])
def test_a_class_goes_before_a_lower_one_for_a_while_and_not_for_ever(goal, aging):
    for higher, lower in ((HIGH, NORMAL), (NORMAL, LOW)):
        adaptive = policy(goal=goal)
        waiting = adaptive.order(5.0, 5.0 + goal, lower)
        before, after = 5.0 + 0.99 * aging, 5.0 + 1.01 * aging
        assert adaptive.order(before, before + goal, higher) < waiting
        assert adaptive.order(after, after + goal, higher) > waiting


def test_under_a_goal_one_of_each_class_goes_first_now_and_then():
    """Who is refused at once could not wait until others are later."""
    moments = [0.03 * number for number in range(100)]
    for priority in (NORMAL, LOW):
        adaptive = policy(goal=0.3)
        orders = []
        for now in moments:
            adaptive.promote(now, HIGH)
            orders.append(adaptive.order(now, 9.0, adaptive.promote(now, priority)) - now - 0.3)
        promoted = [now for now, late in zip(moments, orders, strict=True) if late < 0.01]
        gaps = [after - before for before, after in pairwise([0.0, *promoted])]
        assert all(0.1 <= gap <= 0.131 for gap in gaps)


def test_among_equals_nobody_goes_first():
    adaptive = policy(goal=0.3)
    assert {adaptive.promote(0.05 * number, NORMAL) for number in range(50)} == {NORMAL}


def test_sorting_the_queue_again_promotes_no_job():
    adaptive = policy(goal=0.3)
    for now in (0.0, 0.2, 0.4):
        adaptive.order(now, math.inf, HIGH)
        assert adaptive.order(now, math.inf, NORMAL) == pytest.approx(now + 0.4)
    assert adaptive.promote(0.5, NORMAL) is NORMAL


def test_without_a_goal_nobody_is_refused_and_each_waits_for_its_turn():
    adaptive = policy()
    assert [adaptive.order(now, math.inf, LOW) - now for now in (0.0, 5.0, 50.0)] == [3.0] * 3


# -- how many leave --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("queued", "plan"),
    [
        (1, Plan(1, Reason.WORK_CONSERVING)),
        (5, Plan(5, Reason.WORK_CONSERVING)),
        (8, Plan(8, Reason.FULL)),
        (99, Plan(8, Reason.FULL)),
    ],
)
@pytest.mark.parametrize("deadline", [math.inf, 1.0])
def test_all_that_wait_leave_at_once(make_queue, queued, plan, deadline):
    assert policy().plan(0.0, make_queue([deadline] * queued), IDLE) == plan


@pytest.mark.parametrize(
    ("deadlines", "shed", "take"),
    [
        ([0.009, 1.0, 1.0], 1, 2),
        # Three take 12 ms. A batch is not made smaller for its first.
        ([0.0121, 1.0, 1.0], 0, 3),
        ([0.0119, 1.0, 1.0], 1, 2),
        ([0.0119, 0.0119, 0.0119], 1, 2),
        ([0.0109, 0.0109, 0.0109], 2, 1),
        ([0.0119], 0, 1),
        ([0.001, 0.009, 1.0], 2, 1),
        ([-5.0], 1, 0),
        ([0.001, 0.005, 0.009], 3, 0),
    ],
)
def test_heads_that_cannot_be_in_time_are_refused(make_queue, deadlines, shed, take):
    plan = policy().plan(0.0, make_queue(deadlines), IDLE)
    assert (plan.shed, plan.take) == (shed, take)


def test_a_head_is_refused_that_would_make_the_others_late(make_queue):
    """Two would fit into its 11 ms, and the eight behind them then be late; they take 17 ms."""
    plan = policy().plan(0.0, make_queue([0.0111, *[0.02] * 8]), IDLE)
    assert (plan.shed, plan.take, plan.reason) == (1, 8, Reason.FULL)


DEADLINES = st.lists(
    st.floats(-0.02, 0.2) | st.floats(0.009, 0.015) | st.just(math.inf), min_size=1, max_size=40
)


class WaitingJobs:
    """Jobs in the order of their deadlines, which arrived at 0."""

    oldest_arrival = 0.0

    def __init__(self, deadlines: list[float]) -> None:
        self.deadlines = sorted(deadlines)
        self.earliest_deadline = self.deadlines[0]

    def __len__(self) -> int:
        return len(self.deadlines)

    @property
    def sharing_count(self) -> int:
        return len(self.deadlines)

    def deadline_at(self, index: int) -> float:
        return self.deadlines[index]


@given(
    DEADLINES,
    st.integers(1, 16),
    st.sampled_from([IDLE, LAST, SEVERAL, WorkerPoolState(1, last_idle_at=-0.001)]),
    st.sampled_from([0.0, 0.005, math.inf]),
    st.sampled_from([0, 9]),
    st.integers(0, 99),
)
def test_whoever_leaves_is_in_time_and_only_heads_are_refused(
    deadlines, size, workers, max_hold, num_requests, arrivals
):
    queue, mean = WaitingJobs(deadlines), Costs().mean
    adaptive = policy(size, max_hold=max_hold, num_requests=num_requests)
    for _ in range(arrivals):
        arrive(adaptive, 0.0)
    plan = adaptive.plan(0.0, queue, workers)
    may_leave = [min(size, len(queue) - shed) for shed in range(len(queue))]
    for shed in range(plan.shed):
        assert queue.deadlines[shed] < mean(may_leave[shed])
    if plan.take:  # as many as there are, never fewer
        assert plan.take == may_leave[plan.shed]
        assert mean(plan.take) <= queue.deadlines[plan.shed]
    elif plan.shed:  # what is behind them may be held, for the last of several workers
        assert plan.shed == len(queue) or workers.size > 1
    else:
        assert 0.0 < plan.until <= max(0.0, queue.deadlines[0] - mean(len(queue)))
        assert plan.full > len(queue)


# -- when: holding back ----------------------------------------------------------------------------

RATE = 500.0  # four workers of 20 ms: three to a batch keep them stable


def used_to(rate: float, adaptive: Adaptive, queue: JobQueue) -> Adaptive:
    """After a second of arrivals at this rate, of which the last was at 0."""
    adaptive.plan(-1.0, queue, LAST)
    arrivals = int(rate)
    for number in range(arrivals):
        arrive(adaptive, (number - arrivals + 1) / rate)
    return adaptive


def test_the_last_that_is_idle_at_light_load_waits_for_a_batch_that_keeps_all_stable(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT), make_queue(1))
    plan = adaptive.plan(0.0, make_queue(1), LAST)
    assert (plan.take, plan.full) == (0, 3)
    assert plan.until == pytest.approx(2 * 2 / RATE, rel=0.05)
    assert adaptive.plan(0.001, make_queue(3), LAST) == Plan(3, Reason.TARGET)
    # No job has arrived meanwhile: the rate is lower, and the missing jobs take a little longer.
    assert adaptive.plan(1.2 * plan.until, make_queue(1), LAST) == Plan(1, Reason.HOLD_EXPIRED)


def test_a_hold_counts_from_the_arrival_of_the_oldest(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT), make_queue(1))
    now, before = (adaptive.plan(0.0, make_queue(1, arrived), LAST) for arrived in (0.0, -0.005))
    assert before.until == pytest.approx(now.until - 0.005)


@pytest.mark.parametrize(
    ("options", "rate", "workers", "jobs", "reason"),
    [
        ({}, RATE / 2, IDLE, 1, Reason.WORK_CONSERVING),
        ({"max_hold": 0.0}, RATE, LAST, 1, Reason.WORK_CONSERVING),
        # The next batch finds an idle worker, too.
        ({}, RATE, SEVERAL, 1, Reason.WORK_CONSERVING),
        (
            {},
            RATE,
            WorkerPoolState(2, busy={"a": (0.01, 1), "b": (0.01, 1)}),
            1,
            Reason.WORK_CONSERVING,
        ),
        # One at a time keeps up with it.
        ({}, 100.0, LAST, 1, Reason.WORK_CONSERVING),
        # More than 0.8 of what four workers can do with eight to a batch: 1333 per second.
        ({}, 1200.0, LAST, 1, Reason.WORK_CONSERVING),
        ({"num_requests": 5}, RATE, LAST, 2, Reason.NO_MORE_CLIENTS),
        ({"num_requests": 3}, RATE, LAST, 1, Reason.NO_MORE_CLIENTS),
    ],
)
def test_nothing_is_held_where_that_does_not_pay(make_queue, options, rate, workers, jobs, reason):
    adaptive = used_to(rate, policy(costs=FLAT, **options), make_queue(1))
    assert adaptive.plan(0.0, make_queue(jobs), workers) == Plan(jobs, reason)


def test_near_capacity_under_a_goal_the_last_that_is_idle_waits_for_a_full_batch(make_queue):
    """Four workers of 24 ms carry 1333 per second with eight to a batch, and 195 with one."""
    adaptive = used_to(1200.0, policy(costs=FLAT, goal=0.04), make_queue(1))
    plan = adaptive.plan(0.0, make_queue([0.04] * 3), LAST)
    assert (plan.take, plan.full) == (0, 8)
    assert plan.until == pytest.approx(2 * 7 / 1200, rel=0.05)
    assert adaptive.plan(0.001, make_queue([0.04] * 8), LAST) == Plan(8, Reason.FULL)
    urgent = adaptive.plan(0.0, make_queue([0.026] * 3), LAST)  # but none is late for that
    assert urgent.take == 0
    assert urgent.until < 0.026 - FLAT.mean(4)


def test_behind_those_that_are_refused_others_may_be_held(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT), make_queue(1))
    plan = adaptive.plan(0.0, make_queue([0.01, 1.0]), LAST)
    assert (plan.shed, plan.take) == (1, 0)


def test_before_anybody_has_come_nothing_is_held(make_queue):
    plan = policy(costs=FLAT).plan(0.0, make_queue(1), LAST)
    assert plan == Plan(1, Reason.WORK_CONSERVING)


def test_the_last_client_that_can_come_ends_a_hold(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT, num_requests=5), make_queue(1))
    plan = adaptive.plan(0.0, make_queue(1), LAST)
    assert (plan.take, plan.full) == (0, 2)


def test_the_longest_hold_is_the_configured_one(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT, max_hold=0.002), make_queue(1))
    assert adaptive.plan(0.0, make_queue(1), LAST).until == 0.002


def test_a_hold_takes_no_more_than_its_share_of_the_slack(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT), make_queue(1))
    plan = adaptive.plan(0.0, make_queue([0.031]), LAST)
    assert plan.until == pytest.approx(0.3 * (0.031 - FLAT.mean(2)))
    assert adaptive.plan(0.0, make_queue([0.0206]), LAST) == Plan(1, Reason.HOLD_EXPIRED)


def test_a_rate_is_forgotten(make_queue):
    adaptive = used_to(RATE, policy(costs=FLAT), make_queue(1))
    assert adaptive.plan(0.0, make_queue(1), LAST).take == 0
    assert adaptive.plan(1.0, make_queue(1, arrived=1.0), LAST).take == 1


@pytest.mark.parametrize(("per_batch", "target"), [(0.040, 6), (0.012, 2)])
def test_a_rate_stays_what_it_is_when_batches_become_dearer_or_cheaper(
    make_queue, per_batch, target
):
    """The rate is averaged over some batches: a longer or a shorter time from then on."""
    adaptive = used_to(RATE, policy(costs=FLAT), make_queue(1))
    adaptive.costs = Costs(0.0005, per_batch)
    plan = adaptive.plan(0.0, make_queue(1), LAST)
    assert (plan.take, plan.full) == (0, target)
    assert plan.until == pytest.approx(2 * (target - 1) / RATE, rel=0.05)


# -- when: clients that come back ------------------------------------------------------------------

MOMENT = 0.010


@pytest.mark.parametrize(
    ("options", "full", "until"),
    [
        ({"num_requests": 4}, 4, 5.0 + MOMENT),
        ({"num_requests": 99}, 8, 5.0 + MOMENT),
        ({"num_requests": 4, "max_hold": 0.002}, 4, 5.002),
    ],
)
def test_one_worker_waits_a_moment_for_the_clients_it_has_just_answered(
    make_queue, options, full, until
):
    adaptive, workers = policy(costs=FLAT, **options), WorkerPoolState(1, last_idle_at=5.0)
    adaptive.answered(5.0, 4)
    plan = adaptive.plan(5.001, make_queue(1, arrived=4.0), workers)
    assert (plan.take, plan.full, plan.until) == (0, full, pytest.approx(until))
    assert adaptive.plan(plan.until, make_queue(2), workers) == Plan(2, Reason.HOLD_EXPIRED)
    reason = Reason.FULL if full == adaptive.size else Reason.NO_MORE_CLIENTS
    assert adaptive.plan(5.001, make_queue(full), workers) == Plan(full, reason)


@pytest.mark.parametrize(
    ("options", "now", "reason"),
    [
        ({}, 5.001, Reason.WORK_CONSERVING),
        ({"num_requests": 4, "max_hold": 0.0}, 5.001, Reason.WORK_CONSERVING),
        ({"num_requests": 1}, 5.001, Reason.NO_MORE_CLIENTS),
        # All that were answered have come back, or will not.
        ({"num_requests": 4}, 5.0 + 1.01 * MOMENT, Reason.HOLD_EXPIRED),
    ],
)
def test_one_worker_waits_for_nobody_else(make_queue, options, now, reason):
    adaptive = policy(costs=FLAT, **options)
    adaptive.answered(5.0, 4)
    assert adaptive.plan(now, make_queue(1), WorkerPoolState(1, last_idle_at=5.0)) == Plan(
        1, reason
    )


@pytest.mark.parametrize("returned", [0, 2])
def test_one_worker_does_not_wait_for_clients_that_are_farther_away(make_queue, returned):
    adaptive = answering(policy(costs=FLAT, num_requests=4), 40, returned)
    plan = adaptive.plan(5.001, make_queue(1), WorkerPoolState(1, last_idle_at=5.0))
    assert plan == Plan(1, Reason.WORK_CONSERVING)


def answering(adaptive: Adaptive, batches: int, returned: int) -> Adaptive:
    """Up to the moment 5, batches of four, each followed by a number of jobs within 1 ms."""
    for number in reversed(range(batches)):
        now = 5.0 - 0.03 * number
        adaptive.answered(now, 4)
        for _ in range(returned if number else 1):
            arrive(adaptive, now + 0.001)
    return adaptive


@pytest.mark.parametrize(
    ("costs", "until"), [(FLAT, 5.010), (Costs(0.0, 0.003), 5.0 + 0.5 * 0.003)]
)
def test_one_worker_waits_for_clients_that_it_has_seen_to_come_back(make_queue, costs, until):
    adaptive, workers = answering(policy(costs=costs), 40, 4), WorkerPoolState(1, last_idle_at=5.0)
    plan = adaptive.plan(5.001, make_queue(1), workers)
    assert (plan.take, plan.full, plan.until) == (0, 4, pytest.approx(until))
    for _ in range(3):
        arrive(adaptive, 5.0011)
    assert adaptive.plan(5.0011, make_queue(4), workers) == Plan(4, Reason.WORK_CONSERVING)


def test_one_worker_does_not_wait_for_ever_for_those_who_do_not_come(make_queue):
    adaptive, workers = answering(policy(costs=FLAT), 40, 4), WorkerPoolState(1, last_idle_at=5.0)
    assert adaptive.plan(5.010, make_queue(1), workers) == Plan(1, Reason.WORK_CONSERVING)


@pytest.mark.parametrize(("batches", "returned"), [(3, 4), (40, 2), (40, 0)])
def test_one_worker_waits_for_no_clients_of_whom_it_has_not_seen_that(
    make_queue, batches, returned
):
    adaptive = answering(policy(costs=FLAT), batches, returned)
    plan = adaptive.plan(5.001, make_queue(1), WorkerPoolState(1, last_idle_at=5.0))
    assert plan == Plan(1, Reason.WORK_CONSERVING)


def test_who_comes_after_a_fast_model_would_have_waited_has_not_come_back(make_queue):
    """In 2 ms an open stream brings as many as a batch of a model that takes 1 ms, by chance."""
    adaptive = answering(policy(costs=Costs(0.0, 0.001)), 40, 4)
    plan = adaptive.plan(5.0001, make_queue(1), WorkerPoolState(1, last_idle_at=5.0))
    assert plan == Plan(1, Reason.WORK_CONSERVING)


def test_that_clients_come_back_is_forgotten_when_they_do_not(make_queue):
    adaptive = answering(answering(policy(costs=FLAT), 40, 4), 10, 0)
    plan = adaptive.plan(5.001, make_queue(1), WorkerPoolState(1, last_idle_at=5.0))
    assert plan == Plan(1, Reason.WORK_CONSERVING)


def test_nobody_becomes_late_for_clients_that_may_come_back(make_queue):
    adaptive, workers = policy(costs=FLAT, num_requests=4), WorkerPoolState(1, last_idle_at=5.0)
    adaptive.answered(5.0, 4)
    hurried = make_queue([5.026], arrived=5.0)
    plan = adaptive.plan(5.0, hurried, workers)
    assert (plan.take, plan.shed) == (0, 0)
    assert plan.until == pytest.approx(5.026 - FLAT.mean(4))
    assert adaptive.plan(plan.until, hurried, workers) == Plan(1, Reason.HOLD_EXPIRED)
    assert adaptive.plan(5.0, make_queue([5.021], arrived=5.0), workers) == Plan(
        1, Reason.HOLD_EXPIRED
    )


# -- costs that were overestimated -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("queued", "workers"),
    [
        (1, IDLE),
        (0, WorkerPoolState(0, busy={"a": (0.0, 1)})),
        (1, WorkerPoolState(0, busy={"a": (0.0, 1)})),
    ],
)
def test_nobody_is_let_in_to_see_where_somebody_is_already(make_queue, queued, workers):
    adaptive = policy(costs=Costs(per_batch=10.0))
    assert not admitted(adaptive.admit(0.0, 0.05, make_queue([0.04] * queued), workers))


# -- costs that vary -------------------------------------------------------------------------------


def test_who_would_be_late_in_a_full_batch_is_refused(make_queue):
    deadlines = [5.016, 5.0169, *[5.03] * 14]  # a batch of eight takes 17 ms
    plan = policy().plan(5.0, make_queue(deadlines), IDLE)
    assert (plan.shed, plan.take) == (2, 8)


def test_where_costs_vary_widely_all_that_wait_must_be_in_time_together(make_queue):
    adaptive = policy(costs=Costs(deviation=0.3))
    plan = adaptive.plan(5.0, make_queue([5.0215] * 16), IDLE)
    assert (plan.shed, plan.take) == (4, 8)  # twelve take 21 ms
    assert adaptive.plan(5.0, make_queue([5.0215] * 12), IDLE) == Plan(8, Reason.FULL)


@pytest.mark.parametrize(("jobs", "shed"), [(24, 0), (26, 14)])
def test_where_costs_vary_widely_several_workers_share_what_waits(make_queue, jobs, shed):
    """Of four workers half of the jobs must be in time in one batch; twelve take 21 ms."""
    adaptive = policy(costs=Costs(deviation=0.3))
    assert adaptive.plan(5.0, make_queue([5.0215] * jobs), LAST) == Plan(8, Reason.FULL, shed)


def test_while_more_wait_than_a_batch_takes_the_first_has_a_margin(make_queue):
    adaptive = policy(costs=Costs(deviation=0.2))
    deadlines = [5.018] * 3 + [5.03] * 6  # a batch of eight takes 17 ms, with the margin 22.1 ms
    assert adaptive.plan(5.0, make_queue(deadlines), IDLE) == Plan(8, Reason.FULL, shed=1)
    assert adaptive.plan(5.0, make_queue([5.018] * 30 + [5.03] * 6), IDLE).shed == 28


def test_who_could_only_be_late_is_refused_on_arrival(make_queue):
    adaptive = policy()
    assert adaptive.admit(5.0, 5.0101, make_queue(0), IDLE) is None
    assert adaptive.admit(5.0, 5.0099, make_queue(0), IDLE) == pytest.approx(0.010)


def test_no_plan_refuses_so_many_that_it_takes_long(make_queue):
    plan = policy().plan(5.0, make_queue([4.0] * 10_000), IDLE)
    assert plan.take == 0
    assert 0 < plan.shed <= MAX_SHED
