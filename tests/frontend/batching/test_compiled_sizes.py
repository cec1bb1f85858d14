import math
from dataclasses import dataclass

import pytest

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.compiled_sizes import CompiledSizes, up_to
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.policies import Greedy, Plan, WorkerPoolState

COMPILED = (1, 4, 8)
IDLE = WorkerPoolState(1)


@dataclass
class Line:
    """Costs without noise."""

    per_item: float
    per_batch: float
    is_known: bool = True

    def mean(self, size: float) -> float:
        return self.per_batch + self.per_item * size

    bound = mean

    def chance(self, size: float, seconds: float) -> float:
        return float(seconds >= self.mean(size))


def taken(costs: Line, waiting: JobQueue, largest: int = 8) -> int:
    """How many jobs leave together if nothing is held."""
    size = min(largest, up_to(COMPILED, largest)[-1])
    plan = Greedy(size).plan(0.0, waiting, IDLE)
    return CompiledSizes(COMPILED, costs).fit(plan, size, 0.0, waiting).take


@pytest.mark.parametrize(
    ("costs", "queued", "take"),
    [
        (Line(0.01, 0.001), 4, 4),
        (Line(0.01, 0.001), 8, 8),
        (Line(0.01, 0.001), 99, 8),
        # Padding 5 to 8 costs 81/5 per request, 4 cost 41/4: cut down.
        (Line(0.01, 0.001), 5, 4),
        (Line(0.01, 0.001), 3, 1),
        # 81/7 is dearer than 41/4 still; where a batch costs much by itself, pad up.
        (Line(0.01, 0.001), 7, 4),
        (Line(0.001, 0.1), 5, 5),
        (Line(0.001, 0.1), 2, 2),
    ],
)
def test_a_batch_is_padded_or_cut_by_the_cost_of_a_request(make_queue, costs, queued, take):
    assert taken(costs, make_queue(queued)) == take


def test_nothing_is_cut_while_costs_are_unknown(make_queue):
    assert taken(Line(0.0, 0.0, is_known=False), make_queue(5)) == 5


@pytest.mark.parametrize(("deadline", "take"), [(0.053, 4), (0.05, 5)])
def test_nobody_is_left_behind_who_would_then_be_late(make_queue, deadline, take):
    waiting = make_queue([math.inf] * 4 + [deadline])
    assert taken(Line(0.01, 0.001), waiting) == take  # a batch of 4, then one of 1: 52 ms


def test_who_goes_alone_is_not_cut(make_queue):
    alone = Plan(1, Reason.SINGLE)
    assert CompiledSizes((4, 8), Line(0.01, 0.001)).fit(alone, 8, 1.0, make_queue(5)) == alone


@pytest.mark.parametrize(
    ("largest", "sizes"), [(8, (1, 4, 8)), (6, (1, 4)), (4, (1, 4)), (3, (1,)), (1, (1,))]
)
def test_a_limit_leaves_the_sizes_within_it(make_queue, largest, sizes):
    assert up_to(COMPILED, largest) == sizes
    assert taken(Line(0.001, 0.1), make_queue(9), largest) == sizes[-1]


def test_a_limit_below_the_smallest_size_leaves_that():
    assert up_to((4, 8), 2) == (4,)


@pytest.mark.parametrize(("size", "runs"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 8)])
def test_a_compiled_size_costs_what_it_runs_as(size, runs):
    costs = CompiledSizes(COMPILED, Line(0.01, 0.001))
    assert costs.is_known
    assert costs.mean(size) == costs.bound(size) == 0.001 + 0.01 * runs
