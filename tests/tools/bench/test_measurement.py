import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import run

MILLISECONDS = st.lists(st.floats(0.001, 1e6), min_size=1, max_size=300)
PERCENTS = st.one_of(
    st.sampled_from(["50", "90", "99", "99.9", "99.99", "100"]),
    st.decimals(0, 100, places=3).map(str),
)


@given(latencies=MILLISECONDS, percent=PERCENTS)
def test_a_percentile_is_the_least_value_that_so_many_percent_kept_within(latencies, percent):
    share, count = Fraction(percent) / 100, len(latencies)
    found = run(latencies_ms=latencies).percentile_ms(float(percent))
    within = sum(latency <= found for latency in latencies)
    below = sum(latency < found for latency in latencies)
    assert found in latencies
    assert Fraction(within, count) >= share
    assert Fraction(below, count) < share or found == min(latencies)


@given(latencies=MILLISECONDS)
def test_the_median_lies_between_those_that_statistics_knows(latencies):
    from statistics import median_high, median_low

    found = run(latencies_ms=latencies).percentile_ms(50)
    assert median_low(latencies) <= found <= median_high(latencies)


@pytest.mark.parametrize(("count", "percent", "rank"), [(1000, 99.9, 999), (10000, 99.99, 9999)])
def test_a_decimal_percentile_is_not_a_rank_too_high(count, percent, rank):
    assert run(latencies_ms=range(1, count + 1)).percentile_ms(percent) == rank


def test_without_answers_nothing_is_known():
    nothing = run(latencies_ms=[])
    assert math.isnan(nothing.percentile_ms(99))
    assert math.isnan(nothing.mean_ms)
    assert nothing.failure(1.0) == "Not one request was answered with success: no answer."


@pytest.mark.parametrize(("allowed", "has_failed"), [(0.0, True), (0.19, True), (0.2, False)])
def test_more_errors_than_are_allowed_fail_a_run(allowed, has_failed):
    failure = run(errors={"503": 1}).failure(allowed)
    assert bool(failure) is has_failed
    assert not has_failed or "20.00% of the requests failed" in failure
    assert not has_failed or failure.endswith(": 503 (1).")


def test_refusals_under_a_goal_are_no_failure_but_those_of_all_requests_are():
    assert run(goal_ms=50, refused=400).failure(0.0) == ""
    failure = run(latencies_ms=[], goal_ms=50, refused=4).failure(0.0)
    assert failure == "Not one request was answered with success: refused (4)."
