"""When the requests of an open loop are due."""

from itertools import islice, takewhile

import pytest

from marserve.frontend.bench.generator.arrivals import due_moments
from marserve.frontend.bench.generator.load import Load


def first(count: int, load: Load) -> list[float]:
    return list(islice(due_moments(load), count))


def test_equal_distances_do_not_drift() -> None:
    moments = first(100_001, Load(rate=300.0, arrivals="uniform"))
    assert moments[0] == 0
    assert moments[-1] == 100_000 / 300


def test_random_arrivals_keep_the_rate_and_are_as_uneven_as_a_poisson_process() -> None:
    seconds, rate = 200, 50.0
    moments = list(takewhile(lambda one: one < seconds, due_moments(Load(rate=rate))))
    counts = [0] * seconds
    for moment in moments:
        counts[int(moment)] += 1
    mean = sum(counts) / seconds
    variance = sum((one - mean) ** 2 for one in counts) / seconds
    assert mean == pytest.approx(rate, rel=0.05)
    assert variance == pytest.approx(mean, rel=0.3)  # of a Poisson process they are equal


def test_a_seed_stands_for_the_same_arrivals() -> None:
    assert first(9, Load(rate=5, seed=1)) == first(9, Load(rate=5, seed=1))
    assert first(9, Load(rate=5, seed=1)) != first(9, Load(rate=5, seed=2))


def test_processes_with_equal_distances_take_turns() -> None:
    whole = Load(rate=40, arrivals="uniform")
    parts = [moment for share in whole.shared(4) for moment in first(5, share)]
    assert sorted(parts) == pytest.approx(first(20, whole))


def test_processes_with_random_arrivals_do_not_arrive_together() -> None:
    one, other = Load(rate=40).shared(2)
    assert not set(first(100, one)) & set(first(100, other))
