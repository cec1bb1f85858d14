"""When the requests of an open loop are due."""

import pytest

from marserve.tools.bench.generator.arrivals import due_moments
from marserve.tools.bench.generator.load import Load


def moments(**load: object) -> list[float]:
    return list(due_moments(Load(**load)))


@pytest.mark.parametrize("arrivals", ["poisson", "uniform"])
def test_as_many_are_due_as_the_rate_says(arrivals):
    due = moments(rate=73.5, seconds=2.0, warm_up=4.0, arrivals=arrivals)
    assert due == sorted(due)
    assert sum(item >= 4 for item in due) == 147
    assert sum(item < 4 for item in due) == 294
    assert due[0] >= 0
    assert due[-1] < 6


@pytest.mark.parametrize("arrivals", ["poisson", "uniform"])
def test_so_many_requests_take_as_long_as_the_rate_says(arrivals):
    due = moments(rate=10.0, requests=50, warm_up=1.0, arrivals=arrivals)
    assert len(due) == 60
    assert 5 < due[-1] < 6


def test_there_is_always_one():
    assert len(moments(rate=0.01, seconds=1.0)) == 1


def test_equal_distances_do_not_drift():
    due = moments(rate=300.0, requests=100_001, arrivals="uniform")
    assert due[0] == 0
    assert due[-1] == 100_000 / 300


def test_random_arrivals_are_as_uneven_as_a_poisson_process():
    seconds, rate = 400, 50.0
    counts = [0] * seconds
    for moment in moments(rate=rate, seconds=float(seconds)):
        counts[int(moment)] += 1
    mean = sum(counts) / seconds
    assert mean == rate
    variance = sum((count - mean) ** 2 for count in counts) / seconds
    assert variance == pytest.approx(mean, rel=0.2)


def test_a_seed_stands_for_the_same_arrivals():
    assert moments(rate=5, requests=9, seed=1) == moments(rate=5, requests=9, seed=1)
    assert moments(rate=5, requests=9, seed=1) != moments(rate=5, requests=9, seed=2)


def test_processes_with_equal_distances_take_turns():
    whole = Load(rate=40, seconds=1, warm_up=1, arrivals="uniform")
    parts = [moment for share in whole.shared(4) for moment in due_moments(share)]
    assert sorted(parts) == pytest.approx(list(due_moments(whole)))


def test_processes_with_random_arrivals_do_not_arrive_together():
    one, other = Load(rate=40, seconds=5).shared(2)
    assert not set(due_moments(one)) & set(due_moments(other))
