import random

import pytest

from marserve.frontend.batching.learning.cost_distribution import CostDistribution


def observed(*ratios: float) -> CostDistribution:
    distribution = CostDistribution()
    for ratio in ratios:
        distribution.observe(ratio)
    return distribution


def test_before_anything_was_seen_small_deviations_are_assumed():
    distribution = CostDistribution()
    assert 0.7 < distribution.quantile(0.0) < 1.0 < distribution.quantile(1.0) < 1.4
    assert distribution.quantile(0.5) == pytest.approx(1.0, abs=0.02)


def test_what_was_seen_takes_the_place_of_what_was_assumed():
    distribution = observed(*[0.5] * 10, *[2.0] * 10)
    assert [distribution.quantile(share) for share in (0.0, 0.45, 0.55, 1.0)] == [0.5, 0.5, 2, 2]


def test_a_heavy_tail_is_seen():
    chance = random.Random(1)
    distribution = observed(*(chance.paretovariate(1.5) for _ in range(5000)))
    for share in (0.3, 0.5, 0.8):
        expected = (1.0 - share) ** (-1 / 1.5)
        assert distribution.quantile(share) == pytest.approx(expected, rel=0.25)


def test_what_was_long_ago_is_forgotten():
    assert observed(*[9.0] * 1000, *[1.0] * 256).quantile(1.0) == 1.0


def test_a_single_pause_moves_no_quantile():
    steady, paused = observed(*[1.0] * 30), observed(*[1.0] * 30, 99.0)
    assert paused.quantile(0.97) == steady.quantile(0.97) == 1.0
