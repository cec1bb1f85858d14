import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.batching.policies import FixedWindow, Plan

seconds = st.floats(0, 1e9)


@pytest.mark.parametrize("queued", [4, 5, 400])
def test_a_full_batch_leaves_at_once_and_no_more_than_a_batch(queued: int) -> None:
    assert FixedWindow(4, 10.0).plan(0.0, queued, 0.0) == Plan(4)


@pytest.mark.parametrize(("now", "take"), [(5.0, 0), (5.9, 0), (6.0, 3), (7.0, 3)])
def test_the_window_is_counted_from_the_oldest_arrival(now: float, take: int) -> None:
    assert FixedWindow(4, 1.0).plan(now, 3, 5.0).take == take


def test_who_waits_is_told_until_when_and_for_how_many() -> None:
    assert FixedWindow(4, 1.0).plan(5.5, 3, 5.0) == Plan(0, until=6.0, full=4)


@pytest.mark.parametrize(("queued", "take"), [(1, 1), (2, 2), (3, 3), (9, 4)])
def test_a_delay_of_zero_takes_what_is_there(queued: int, take: int) -> None:
    assert FixedWindow(4, 0.0).plan(5.0, queued, 5.0).take == take


@given(st.integers(1, 64), st.floats(0, 100), seconds, st.integers(1, 1000), seconds)
def test_whatever_happens_size_and_window_are_kept(
    size: int, delay: float, now: float, queued: int, oldest: float
) -> None:
    plan = FixedWindow(size, delay).plan(now, queued, oldest)
    assert plan.take <= min(size, queued)
    if plan.take:
        assert plan.take == size or now >= oldest + delay
    else:
        assert now < plan.until == oldest + delay
        assert queued < plan.full == size
