import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.batches import Reason
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.policies import Greedy, Plan, WorkerPoolState
from marserve.frontend.batching.sizing import CompiledSizes, MemoryCap, knee, largest_that_pays

SIZES = (1, 2, 4, 8, 16, 32)
MakeQueue = Callable[..., JobQueue]
IDLE = WorkerPoolState(1)


@dataclass
class Exactly:
    """Costs without noise."""

    of: Callable[[int], float]
    is_known: bool = True

    def mean(self, size: float) -> float:
        return self.of(size)

    def bound(self, size: float) -> float:
        return self.of(size)


def line(per_item: float, per_batch: float) -> Exactly:
    return Exactly(lambda size: per_batch + per_item * size)


# -- the knee --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "goal", "size", "why"),
    [
        # The whole of the cost is the items': nothing to gain.
        (line(0.01, 0.0), math.inf, 1, "does not pay"),
        (line(0.01, 0.0005), math.inf, 1, "does not pay"),
        # All of it is the batch's: the more the better.
        (line(0.0, 0.01), math.inf, 32, "32 times"),
        # 32 serve 94.1 per second, 16 serve 88.9: not 95 % of that.
        (line(0.01, 0.02), math.inf, 32, "2.8 times"),
        # 32 serve 98.8, 8 serve 95.2: enough; 4 serve 90.9: not.
        (line(0.01, 0.004), math.inf, 8, "1.3 times"),
        # Two batches within the goal.
        (line(0.0, 0.01), 0.02, 32, "32 times"),
        (line(0.01, 0.02), 0.13, 4, "within the latency goal"),
        (line(0.01, 0.02), 0.06, 1, "does not pay"),
        (line(0.01, 0.02), 0.05, 1, "no two batches fit"),
    ],
)
def test_the_knee(costs: Exactly, goal: float, size: int, why: str) -> None:
    choice = knee(SIZES, costs, goal)
    assert choice.size == size
    assert why in choice.why


def test_a_size_that_is_worse_than_a_smaller_one_is_not_chosen() -> None:
    thrashing = Exactly(lambda size: 0.01 + (0.001 * size if size <= 8 else 0.1 * size))
    assert knee(SIZES, thrashing).size == 8


@given(
    st.lists(st.floats(1e-4, 10.0), min_size=6, max_size=6),
    st.floats(1e-4, 100.0) | st.just(math.inf),
)
def test_the_chosen_size_keeps_its_promise(seconds: list[float], goal: float) -> None:
    costs = Exactly(dict(zip(SIZES, seconds, strict=True)).__getitem__)
    chosen = knee(SIZES, costs, goal).size
    assert chosen in SIZES
    fitting = [size for size in SIZES if 2 * costs.bound(size) <= goal]
    best = max((size / costs.mean(size) for size in fitting), default=0.0)
    if chosen > 1:
        assert chosen in fitting
        assert chosen / costs.mean(chosen) >= 0.95 * best
        assert chosen / costs.mean(chosen) >= 1.1 * fitting[0] / costs.mean(fitting[0])


@pytest.mark.parametrize(
    ("costs", "size", "why"),
    [
        (line(0.01, 0.0), 4, "does not pay"),
        (line(0.0, 0.01), 32, "8 times the throughput of size 4"),
    ],
)
def test_the_knee_of_sizes_that_begin_above_one(costs: Exactly, size: int, why: str) -> None:
    choice = knee((4, 8, 16, 32), costs)
    assert choice.size == size
    assert why in choice.why
    assert knee((4, 8), costs, 0.001).size == 4


@pytest.mark.parametrize(
    ("throughputs", "largest"),
    [
        ((), math.inf),
        ((1,), math.inf),
        ((1, 2, 4, 8), math.inf),
        ((1, 2, 4, 3.61), math.inf),
        ((1, 2, 4, 3.59), 4),
        ((1, 4, 3.7, 3.5), 4),
        ((4, 3.7, 3.5, 1), 2),
        # What lies between is not worse than what comes after it.
        ((1, 4, 2, 4), math.inf),
    ],
)
def test_the_size_beyond_which_batches_only_become_slower(
    throughputs: tuple[float, ...], largest: float
) -> None:
    sizes = SIZES[: len(throughputs)]
    costs = {size: size / rate for size, rate in zip(sizes, throughputs, strict=True)}
    assert largest_that_pays(sizes, Exactly(costs.__getitem__), 0.1) == largest


# -- memory ----------------------------------------------------------------------------------------


def test_a_batch_that_did_not_fit_is_halved() -> None:
    cap = MemoryCap()
    assert cap.at(0.0) == math.inf
    cap.exceeded(32, 0.0)
    assert cap.at(1.0) == 16
    cap.exceeded(64, 2.0)
    assert cap.at(3.0) == 16
    for _ in range(9):
        cap.exceeded(1, 4.0)
    assert cap.at(5.0) == 1


def test_what_is_known_to_fit_is_not_cut_off() -> None:
    cap = MemoryCap()
    cap.exceeded(96, 0.0, fits=64)
    assert cap.at(1.0) == 64
    cap.exceeded(96, 2.0, fits=32)
    assert cap.at(3.0) == 48


def test_the_cap_grows_by_a_quarter_every_ten_minutes() -> None:
    cap = MemoryCap()
    cap.exceeded(32, 100.0)
    grown = [cap.at(100.0 + 600.0 * step - early) for step in (1, 2) for early in (1.0, 0.0)]
    assert grown == [16, 20, 20, 25]
    cap.exceeded(25, 1400.0)
    assert [cap.at(1999.0), cap.at(2000.0)] == [12, 15]


def test_the_cap_grows_for_all_the_time_that_nobody_asked() -> None:
    cap = MemoryCap()
    cap.exceeded(32, 0.0)
    assert cap.at(599.0 + 3 * 600.0) == 31
    cap.exceeded(64, 3000.0)
    assert cap.at(4e7) == math.inf
    assert cap.grows_at == math.inf


def test_the_smallest_cap_grows_too() -> None:
    cap = MemoryCap()
    cap.exceeded(2, 0.0)
    assert [cap.at(600.0 * step) for step in range(1, 5)] == [2, 3, 4, 5]


# -- compiled sizes --------------------------------------------------------------------------------

COMPILED = (1, 4, 8)


def taken(costs: Exactly, waiting: JobQueue, bound: int = 8) -> int:
    """How many leave of those that wait, where all of them would."""
    compiled = CompiledSizes(COMPILED, costs)
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
    assert CompiledSizes(COMPILED, costs).limit(bound) == size
    assert taken(costs, make_queue(queued), bound) == take


def test_a_bound_below_the_smallest_size_bounds_the_requests() -> None:
    compiled = CompiledSizes((4, 8), line(0.001, 0.1))
    assert compiled.limit(2) == 2
    assert compiled.limit(8) == 8


@pytest.mark.parametrize(("size", "runs"), [(1, 1), (2, 4), (4, 4), (5, 8), (8, 8), (9, 8)])
def test_a_compiled_size_costs_what_it_runs_as(size: int, runs: int) -> None:
    costs = CompiledSizes(COMPILED, line(0.01, 0.001))
    assert costs.is_known
    assert costs.mean(size) == costs.bound(size) == 0.001 + 0.01 * runs
