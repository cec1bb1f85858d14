import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.learning.sizes import SizeCap, knee, largest_that_pays

SIZES = (1, 2, 4, 8, 16, 32)


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
        # One batch within the goal, where no two are.
        (line(0.01, 0.02), 0.05, 2, "1.5 times"),
        (line(0.001, 0.02), 0.04, 16, "9.3 times"),
        # No batch: every request is late, and the best throughput delays them least.
        (line(0.001, 0.02), 0.01, 32, "13 times"),
    ],
)
def test_the_knee(costs, goal, size, why):
    choice = knee(SIZES, costs, goal)
    assert choice.size == size
    assert why in choice.why


def test_a_size_that_is_worse_than_a_smaller_one_is_not_chosen():
    thrashing = Exactly(lambda size: 0.01 + (0.001 * size if size <= 8 else 0.1 * size))
    assert knee(SIZES, thrashing).size == 8


@given(
    st.lists(st.floats(1e-4, 10.0), min_size=6, max_size=6),
    st.floats(1e-4, 100.0) | st.just(math.inf),
)
def test_the_chosen_size_keeps_its_promise(seconds, goal):
    costs = Exactly(dict(zip(SIZES, seconds, strict=True)).__getitem__)
    chosen = knee(SIZES, costs, goal).size
    assert chosen in SIZES
    fitting = next(
        filter(None, ([size for size in SIZES if n * costs.bound(size) <= goal] for n in (2, 1))),
        SIZES,
    )
    best = max(size / costs.mean(size) for size in fitting)
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
def test_the_knee_of_sizes_that_begin_above_one(costs, size, why):
    choice = knee((4, 8, 16, 32), costs)
    assert choice.size == size
    assert why in choice.why


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
def test_the_size_beyond_which_batches_only_become_slower(throughputs, largest):
    sizes = SIZES[: len(throughputs)]
    costs = {size: size / rate for size, rate in zip(sizes, throughputs, strict=True)}
    assert largest_that_pays(sizes, Exactly(costs.__getitem__), 0.1) == largest


# -- the cap ---------------------------------------------------------------------------------------

WHY = "size 32 failed"


def test_a_batch_that_did_not_fit_is_halved():
    cap = SizeCap()
    assert cap.at(0.0) == math.inf
    cap.exceeded(32, 0.0, WHY)
    assert (cap.at(1.0), cap.why) == (16, WHY)
    cap.exceeded(64, 2.0, WHY)
    assert cap.at(3.0) == 16
    for _ in range(9):
        cap.exceeded(1, 4.0, WHY)
    assert cap.at(5.0) == 1


def test_what_is_known_to_fit_is_not_cut_off():
    cap = SizeCap()
    cap.exceeded(96, 0.0, WHY, fits=64)
    assert cap.at(1.0) == 64
    cap.exceeded(96, 2.0, WHY, fits=32)
    assert cap.at(3.0) == 48


def test_the_cap_grows_by_a_quarter_every_ten_minutes():
    cap = SizeCap()
    cap.exceeded(32, 100.0, WHY)
    grown = [cap.at(100.0 + 600.0 * step - early) for step in (1, 2) for early in (1.0, 0.0)]
    assert grown == [16, 20, 20, 25]
    cap.exceeded(25, 1400.0, WHY)
    assert [cap.at(1999.0), cap.at(2000.0)] == [12, 15]


def test_the_cap_grows_for_all_the_time_that_nobody_asked():
    cap = SizeCap()
    cap.exceeded(32, 0.0, WHY)
    assert cap.at(599.0 + 3 * 600.0) == 31
    cap.exceeded(64, 3000.0, WHY)
    assert cap.at(4e7) == math.inf
    assert cap.grows_at == math.inf


def test_the_smallest_cap_grows_too():
    cap = SizeCap()
    cap.exceeded(2, 0.0, WHY)
    assert [cap.at(600.0 * step) for step in range(1, 5)] == [2, 3, 4, 5]
