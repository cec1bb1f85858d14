import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.isolation.failure_rate import (
    FailureRate,
    Failures,
    candidates,
    cheapest_size,
    expected_seconds,
)

EIGHT = candidates(8)


class Line:
    """Costs that are a line: seconds per batch and per request."""

    is_known = True

    def __init__(self, per_batch: float, per_request: float) -> None:
        self._line = per_batch, per_request

    def mean(self, size: int) -> float:
        per_batch, per_request = self._line
        return per_batch + per_request * size

    bound = mean


FLAT, STEEP = Line(1.0, 0.0), Line(0.0, 1.0)


def cost_by_halves(bad: list[bool], failed: float, *, fails: bool = False) -> float:
    """What the runs cost that it takes to answer these, by the rule of the splitting."""
    itself = failed if any(bad) else 1.0
    if len(bad) == 1 or not any(bad):
        return itself
    first, second = bad[: len(bad) // 2], bad[len(bad) // 2 :]
    parts = cost_by_halves(first, failed)
    parts += cost_by_halves(second, failed, fails=not any(first))
    return parts if fails else itself + parts


@pytest.mark.parametrize("size", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("share", [0.0, 0.03, 0.1, 0.5])
@pytest.mark.parametrize("failed", [1.0, 0.2])
def test_the_cost_of_splitting_is_that_of_trying(size, share, failed):
    chance = random.Random(1)
    trials = [
        cost_by_halves([chance.random() < share for _ in range(size)], failed)
        for _ in range(20_000)
    ]
    expected = expected_seconds(size, FLAT, Failures(share, cost=failed))
    assert sum(trials) / len(trials) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("share", "size"), [(0.0, 8), (0.1, 8), (0.2, 4), (0.45, 1), (0.9, 1)])
def test_where_a_batch_costs_what_a_request_does_only_many_failures_make_it_smaller(share, size):
    assert cheapest_size(EIGHT, FLAT, Failures(share)) == size


@pytest.mark.parametrize(("share", "size"), [(0.0, 8), (0.1, 1)])
def test_where_batching_gains_nothing_a_tenth_of_failures_ends_it(share, size):
    assert cheapest_size(EIGHT, STEEP, Failures(share)) == size


def test_where_failed_runs_cost_nothing_batches_stay_large():
    assert cheapest_size(EIGHT, FLAT, Failures(0.3)) < 8
    assert cheapest_size(EIGHT, FLAT, Failures(0.3, cost=0.0)) == 8


def test_hints_make_larger_batches_worth_it():
    assert cheapest_size(EIGHT, FLAT, Failures(0.3)) < 8
    assert cheapest_size(EIGHT, FLAT, Failures(0.3, hinted=1.0, checked=0.1)) == 8


@given(
    st.floats(0.0, 1.0),
    st.floats(0.001, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.integers(1, 128),
)
def test_nobody_can_make_it_much_slower_than_single_requests(
    share, per_batch, per_request, hinted, failed, largest
):
    costs, sizes = Line(per_batch, per_request), candidates(largest)
    failures = Failures(share, hinted, cost=failed)
    size = cheapest_size(sizes, costs, failures)
    assert size in sizes
    seconds = expected_seconds(size, costs, failures)
    assert seconds / size <= 1.06 * costs.mean(1)


@pytest.mark.parametrize(
    ("largest", "compiled", "found"),
    [
        (1, (), [1]),
        (8, (), [1, 2, 4, 8]),
        (12, (), [1, 2, 4, 8, 12]),
        (12, (4, 8, 16), [4, 8]),
    ],
)
def test_sizes_to_choose_from(largest, compiled, found):
    assert candidates(largest, compiled) == found


@pytest.fixture
def learn():
    def make(share, requests):
        rate, chance = FailureRate(), random.Random(2)
        for _ in range(requests):
            if chance.random() < share:
                rate.run_failed()
                rate.request_failed()
            else:
                rate.succeeded(1)
        return rate

    return make


@pytest.mark.parametrize("share", [0.03, 0.1, 0.5])
def test_the_share_is_learnt(share, learn):
    assert learn(share, 500).share == pytest.approx(share, abs=0.09)


def test_a_few_hundred_good_requests_and_all_is_forgotten(learn):
    rate = learn(1.0, 60)
    assert cheapest_size(EIGHT, FLAT, Failures(rate.share)) == 1
    rate.succeeded(120)
    assert cheapest_size(EIGHT, FLAT, Failures(rate.share)) == 8
    assert not rate.is_quiet
    rate.succeeded(320)
    assert rate.is_quiet


def test_a_model_that_fails_for_all_is_told_from_requests_that_fail(learn):
    assert not learn(0.9, 400).fails_for_all
    rate = learn(1.0, 64)
    assert rate.fails_for_all
    rate.succeeded(1)
    assert not rate.fails_for_all
