"""Latencies of pairs."""

import pytest

from marserve.tools.doctor.comparison.latency import Latencies


def test_medians_and_their_ratio():
    found = Latencies([(1.0, 2.0), (2.0, 1.0), (4.0, 2.0)])
    assert found.medians == (2.0, 2.0)
    assert found.ratio.value == 1.0
    assert found.ratio.spread is None, "of three pairs"
    assert found.p99 is None


def test_the_spread_is_that_of_stretches_of_time():
    pairs = [(1.0, 0.5 + number // 20) for number in range(100)]
    found = Latencies(pairs)
    assert found.ratio.value == 2.5
    assert found.ratio.spread == (0.5, 4.5)


def test_the_99th_percentile():
    found = Latencies([(float(number), 2.0 * number) for number in range(1, 201)])
    assert found.p99 == pytest.approx((198.0, 396.0))
