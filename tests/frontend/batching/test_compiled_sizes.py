import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.compiled_sizes import CompiledSizes
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.policies import Greedy, Plan, WorkerPoolState

MakeQueue = Callable[..., JobQueue]
IDLE = WorkerPoolState(1)


@dataclass
class Exactly:
    """Costs without noise."""

    of: Callable[[int], float]
    is_known: bool = True

    def mean(self, size: int) -> float:
        return self.of(size)

    def bound(self, size: int) -> float:
        return self.of(size)


def line(per_item: float, per_batch: float) -> Exactly:
    return Exactly(lambda size: per_batch + per_item * size)


SIZES = (1, 4, 8)


def taken(costs: Exactly, waiting: JobQueue, bound: int = 8) -> int:
    """How many leave of those that wait, where all of them would."""
    compiled = CompiledSizes(SIZES, costs)
    plan = Greedy(compiled.limit(bound)).plan(0.0, waiting, IDLE)
    return compiled.fit(plan, 0.0, waiting).take


@pytest.mark.parametrize(
    ("costs", "queued", "take"),
    [
        (line(0.01, 0.001), 4, 4),
        (line(0.01, 0.001), 8, 8),
        (line(0.01, 0.001), 99, 8),
        # Padding 5 to 8 costs 81/5 per request, 4 cost 41/4: cut down.
        (line(0.01, 0.001), 5, 4),
        (line(0.01, 0.001), 3, 1),
        # 81/7 is dearer than 41/4 still; where a batch costs much by itself, pad up.
        (line(0.01, 0.001), 7, 4),
        (line(0.001, 0.1), 5, 5),
        (line(0.001, 0.1), 2, 2),
    ],
)
def test_a_batch_is_padded_or_cut_by_the_cost_of_a_request(
    make_queue: MakeQueue, costs: Exactly, queued: int, take: int
) -> None:
    assert taken(costs, make_queue(queued)) == take


def test_nothing_is_cut_while_costs_are_unknown(make_queue: MakeQueue) -> None:
    assert taken(Exactly(lambda size: 0.0, is_known=False), make_queue(5)) == 5


@pytest.mark.parametrize(("deadline", "take"), [(0.053, 4), (0.05, 5)])
def test_nobody_is_left_behind_who_would_then_be_late(
    make_queue: MakeQueue, deadline: float, take: int
) -> None:
    waiting = make_queue([math.inf] * 4 + [deadline])
    assert taken(line(0.01, 0.001), waiting) == take  # a batch of 4, then one of 1: 52 ms


def test_who_goes_alone_is_not_cut(make_queue: MakeQueue) -> None:
    alone = Plan(1, Reason.SINGLE)
    assert CompiledSizes((4, 8), line(0.01, 0.001)).fit(alone, 1.0, make_queue(5)) == alone


@pytest.mark.parametrize(
    ("bound", "size", "queued", "take"),
    [(8, 8, 9, 8), (6, 4, 9, 4), (4, 4, 9, 4), (3, 1, 9, 1), (1, 1, 9, 1)],
)
def test_a_bound_leaves_the_sizes_within_it(
    make_queue: MakeQueue, bound: int, size: int, queued: int, take: int
) -> None:
    costs = line(0.001, 0.1)
    assert CompiledSizes(SIZES, costs).limit(bound) == size
    assert taken(costs, make_queue(queued), bound) == take


def test_a_bound_below_the_smallest_size_bounds_the_requests() -> None:
    compiled = CompiledSizes((4, 8), line(0.001, 0.1))
    assert compiled.limit(2) == 2
    assert compiled.limit(8) == 8


@pytest.mark.parametrize(("size", "runs"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 8)])
def test_a_compiled_size_costs_what_it_runs_as(size: int, runs: int) -> None:
    costs = CompiledSizes(SIZES, line(0.01, 0.001))
    assert costs.is_known
    assert costs.mean(size) == costs.bound(size) == 0.001 + 0.01 * runs
