import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.learning.buckets import bucket_of
from marserve.frontend.batching.learning.latency_model import LatencyModel

SIZES = (1, 2, 4, 8, 16, 32)


def cost(size: float) -> float:
    return 0.004 + 0.00035 * size


def seeded(of: Callable[[float], float] = cost, sizes: tuple[int, ...] = SIZES) -> LatencyModel:
    model = LatencyModel()
    model.seed((size, of(size)) for size in sizes)
    return model


def observed(*samples: tuple[int, float]) -> LatencyModel:
    model = LatencyModel()
    for size, seconds in samples:
        model.observe(size, seconds)
    return model


# -- what is known ---------------------------------------------------------------------------------


def test_nothing_is_known_at_first():
    model = LatencyModel()
    assert not model.is_known
    assert (model.mean(4), model.bound(4), model.line(), list(model.points)) == (0, 0, (0, 0), [])
    assert model.until_answered(4) == 0


def test_profiling_is_believed_and_sizes_between_are_interpolated():
    model = seeded()
    assert model.is_known
    assert (model.batches_of(8) >= 1, model.batches_of(12) >= 1) == (True, False)
    assert (model.batches_of(8) >= 5, model.batches_of(8) >= 6) == (True, False)
    for size in (1, 2, 3, 5, 8, 20, 32):
        assert model.mean(size) == pytest.approx(cost(size))
    assert [(point.size, point.batches) for point in model.points] == [(size, 5) for size in SIZES]
    assert model.line() == pytest.approx((0.00035, 0.004))


def test_its_points_can_seed_another():
    model = observed(*((1 + n % 7, cost(1 + n % 7)) for n in range(100)))
    other = LatencyModel()
    other.seed((point.size, point.seconds) for point in model.points)
    for size in (1, 3, 6, 7):
        assert other.mean(size) == pytest.approx(model.mean(size), rel=0.02)


def test_beyond_the_largest_it_goes_on_along_the_line():
    assert seeded().mean(64) == pytest.approx(cost(64))


def test_below_the_smallest_it_goes_down_along_the_line():
    assert seeded(sizes=(8, 16)).mean(1) == pytest.approx(cost(1))


def test_of_one_size_alone_all_others_are_taken_to_cost_the_same():
    model = observed((4, 0.08))
    assert model.mean(1) == pytest.approx(0.08)
    assert model.mean(8) == pytest.approx(0.08)
    assert model.line() == pytest.approx((0.0, 0.08))


def test_a_line_never_falls_nor_starts_below_nothing():
    assert seeded(lambda size: 0.1 / size).line()[0] == 0.0
    slope, start = seeded(lambda size: 0.001 * size**2).line()
    assert slope > 0.0
    assert start == pytest.approx(0.0)


def test_a_bucket_holds_sizes_of_about_the_same():
    keys = [bucket_of(size) for size in range(1, 34)]
    assert sorted(set(keys)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert all(size <= key < 1.5 * size + 1 for size, key in zip(range(1, 34), keys, strict=True))


def test_within_a_bucket_cost_moves_with_the_sizes():
    model = seeded(sizes=(1, 24))
    for size in [25, 27, 31, 32, 29] * 20 + [32] * 20:
        model.observe(size, cost(size))
    assert model.mean(32) == pytest.approx(cost(32), rel=0.01)
    assert model.mean(1) == pytest.approx(cost(1), rel=0.02)


# -- the bound -------------------------------------------------------------------------------------


def test_the_bound_is_higher_while_little_is_known():
    few = observed(*[(1, 0.01)] * 7)
    many = observed(*[(1, 0.01)] * 8)
    assert few.bound(1) > 1.25 * many.bound(1)


def test_the_bound_comes_down_to_the_cost_where_that_never_varies():
    model = seeded()
    for _ in range(200):
        model.observe(8, cost(8))
    assert cost(8) <= model.bound(8) <= 1.05 * cost(8)


@pytest.mark.parametrize("sigma", [0.05, 0.15, 0.3])
def test_all_but_about_three_of_a_hundred_batches_are_within_the_bound(sigma):
    chance = random.Random(1)
    shares = []
    for _ in range(20):
        model = seeded()
        for _ in range(300):
            size = chance.randint(1, 32)
            model.observe(size, cost(size) * chance.lognormvariate(0, sigma))
        bound = model.bound(16) / cost(16)
        shares.append(sum(chance.lognormvariate(0, sigma) <= bound for _ in range(100)))
    assert 96 <= sum(shares) / len(shares) <= 98


SAMPLES = st.lists(st.tuples(st.integers(1, 70), st.floats(0, 1e4)), min_size=1, max_size=60)


@given(SAMPLES, SAMPLES)
def test_whatever_was_seen_the_bound_is_positive_and_never_falls(seeds, samples):
    model = observed(*samples)
    model.seed(seeds)
    for size, seconds in samples:
        model.observe(size, seconds)
    bounds = [model.bound(size) for size in range(1, 140)]
    assert bounds[0] > 0.0
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(bounds))
    assert all(model.mean(size) <= model.bound(size) for size in range(1, 140))


# -- how much costs vary ---------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.05, 0.15, 0.5, 1.0])
def test_the_deviation_is_that_of_the_batches(sigma):
    chance = random.Random(4)
    model = seeded()
    draws = [chance.lognormvariate(-(sigma**2) / 2, sigma) for _ in range(600)]
    for draw in draws:
        size = chance.choice(SIZES)
        model.observe(size, cost(size) * draw)
    deviation = sum(abs(draw - 1.0) for draw in draws) / len(draws)
    assert model.deviation == pytest.approx(deviation, rel=0.4)


def test_with_heavy_tails_a_bad_measurement_of_a_size_is_not_believed():
    """It would never run again, if it seemed to be far dearer than the others."""
    chance = random.Random(5)
    model = seeded(lambda size: cost(size) * (4 if size == 32 else 1))
    assert model.mean(32) == pytest.approx(4 * cost(32))
    for _ in range(300):
        size = chance.choice(SIZES[:-1])
        model.observe(size, cost(size) * chance.lognormvariate(-0.5, 1.0))
    assert model.mean(32) < 2 * cost(32)


def test_with_heavy_tails_the_mean_stays_near_what_it_is():
    errors = []
    for seed in range(20):
        chance = random.Random(seed)
        model = seeded()
        for _ in range(300):
            size = chance.choice(SIZES)
            model.observe(size, cost(size) * chance.lognormvariate(-0.5, 1.0))
        errors += [abs(model.mean(size) / cost(size) - 1.0) for size in SIZES]
    assert sum(errors) / len(errors) < 0.3


# -- what does not disturb it ----------------------------------------------------------------------


def test_the_first_samples_count_by_their_median():
    model = observed((1, 5.0), (1, 0.01), (1, 0.012), (1, 0.011), (1, 0.009))
    assert model.mean(1) == 0.011


def test_a_pause_is_no_cost():
    model = seeded()
    for _ in range(20):
        model.observe(8, cost(8))
    model.observe(8, 100 * cost(8))
    for size in SIZES:
        assert model.mean(size) == pytest.approx(cost(size), rel=0.01)
        assert model.bound(size) < 1.2 * cost(size)


def test_pauses_now_and_then_are_no_cost():
    chance = random.Random(2)
    model = seeded()
    for _ in range(2000):
        size, pause = chance.randint(1, 32), 20 if chance.random() < 0.01 else 1
        model.observe(size, pause * cost(size) * chance.lognormvariate(0, 0.15))
    assert 0.8 * cost(16) < model.mean(16) < 1.2 * cost(16)
    assert 1.2 * cost(16) < model.bound(16) < 1.6 * cost(16)


def test_a_first_batch_that_was_compiled_makes_its_size_no_dearer_than_its_items():
    model = observed((32, 100 * cost(32)), (1, cost(1)))
    assert model.mean(32) <= 32 * cost(1) * (1 + 1e-9)
    for _ in range(2):
        model.observe(32, cost(32))
    assert model.mean(32) == pytest.approx(cost(32))


def test_a_size_that_is_dear_every_time_is_believed_to_be():
    model = observed(*[(1, 0.01)] * 3, *[(8, 1.0)] * 3)
    assert model.mean(8) == pytest.approx(1.0)


def test_a_later_profiling_does_not_unlearn_what_traffic_taught():
    model = seeded()
    for _ in range(50):
        model.observe(4, 2 * cost(4))
    before = model.mean(4)
    model.seed([(4, cost(4)), (24, 0.1)])
    assert model.mean(4) == before
    assert model.mean(24) == pytest.approx(0.1)


def test_a_clock_that_stood_still_makes_no_cost_of_nothing():
    model = observed(*[(1, 0.0)] * 50)
    assert model.mean(1) > 0.0
    for _ in range(50):
        model.observe(1, 0.01)
    assert model.mean(1) == pytest.approx(0.01, rel=0.05)


# -- what it follows -------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [0.5, 2.0, 5.0])
def test_a_change_of_pace_is_noticed_soon_and_for_sizes_that_were_not_run(change):
    model = seeded()
    for size in [1, 4, 1, 4] * 5:
        model.observe(size, change * cost(size))
    for size in (1, 4):
        assert model.mean(size) == pytest.approx(change * cost(size), rel=0.1)
    for size in (2, 8, 16, 32):
        assert model.mean(size) == pytest.approx(change * cost(size), rel=0.2)


def test_a_size_first_seen_on_a_slow_machine_is_not_slow_twice():
    model = seeded(sizes=(1, 2, 4, 8))
    for size in (4, 8) * 5:
        model.observe(size, cost(size))
    for size in (16, 16, 16, 4, 8, 4, 8, 16):
        model.observe(size, 3 * cost(size))
    for size in (4, 8, 16):
        assert model.mean(size) == pytest.approx(3 * cost(size), rel=0.1)


def test_five_first_samples_of_a_slow_machine_are_not_slow_twice():
    model = seeded(sizes=(1, 2, 4, 8))
    model.observe(4, cost(4))
    for size in (16, 16, 16, 16, 16, 4, 8, 4, 8):
        model.observe(size, 3 * cost(size))
    for size in (4, 8, 16):
        assert model.mean(size) == pytest.approx(3 * cost(size), rel=0.1)


def test_a_machine_that_is_slower_than_when_it_was_profiled_is_slow_for_all_sizes():
    model = seeded(sizes=(1, 2, 4, 8))
    for size in (4, 8, 4):
        model.observe(size, 3 * cost(size))
    for size in (1, 2, 4, 8):
        assert model.mean(size) == pytest.approx(3 * cost(size), rel=0.1)


def test_a_size_first_seen_before_the_machine_is_slow_becomes_slow_too():
    model = seeded(sizes=(1, 2, 4, 8))
    for size in (16, 16, 16, 4, 8):
        model.observe(size, cost(size))
    for size in (4, 8, 4, 8):
        model.observe(size, 3 * cost(size))
    assert model.mean(16) == pytest.approx(3 * cost(16), rel=0.1)


def test_the_first_samples_of_a_bucket_count_with_the_size_of_their_median():
    model = seeded(sizes=(1, 2, 4, 8, 16))
    for size in (17, 24, 18):
        model.observe(size, cost(size))
    assert model.mean(24) == pytest.approx(cost(24))


def test_a_change_of_pace_is_noticed_though_samples_are_noisy():
    chance = random.Random(3)
    model = seeded()
    for _ in range(30):
        size = chance.choice((1, 4))
        model.observe(size, 2 * cost(size) * chance.lognormvariate(0, 0.15))
    assert model.mean(32) == pytest.approx(2 * cost(32), rel=0.25)


def test_a_slow_change_is_followed():
    model = seeded()
    for step in range(200):
        model.observe(4, (1 + step / 200) * cost(4))
    assert model.mean(4) == pytest.approx(2 * cost(4), rel=0.05)
    assert model.mean(32) == pytest.approx(2 * cost(32), rel=0.15)


def test_a_size_whose_own_cost_changed_is_not_taken_for_the_pace_of_the_machine():
    model = seeded()
    for size in [1, 8] * 150:
        model.observe(size, cost(size) * (3 if size == 8 else 1))
    assert model.mean(1) == pytest.approx(cost(1), rel=0.05)
    assert model.mean(8) == pytest.approx(3 * cost(8), rel=0.05)


def test_who_has_a_deadline_counts_the_time_until_answers_have_gone_out():
    model = LatencyModel()
    model.seed([(1, 0.01), (8, 0.02)])
    mean, bound = model.mean(8), model.bound(8)
    for _ in range(100):
        model.observe_sending(0.003)
    assert model.bound(8) == pytest.approx(bound + 0.003, rel=1e-3)
    assert model.mean(8) == mean
    assert model.until_answered(8) == pytest.approx(mean + 0.003, rel=1e-3)


def test_costs_are_learnt_anew_from_others():
    model = LatencyModel()
    model.seed([(1, 0.01), (8, 0.02)])
    for _ in range(20):
        model.observe(4, 0.5)
    model.relearn([(4, 0.05), (8, 0.08)])
    assert [(point.size, point.seconds) for point in model.points] == [(4, 0.05), (8, 0.08)]
    assert model.mean(6) == pytest.approx(0.065)
    assert model.knows(8)  # it was profiled
