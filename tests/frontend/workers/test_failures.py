"""How a worker fails: the report, and the time until it is tried again."""

import pytest

from marserve.frontend.workers.failures import Backoff, Failure, report


def test_an_exception_of_several_lines_passed_for_lines_of_the_log():
    failure = Failure("ValueError: a\n2026-01-01 [INFO ] forged\x07", "", 0.0)
    assert report(failure, "W-9000-m_1.0").splitlines() == [
        "Backend worker error: W-9000-m_1.0: ValueError: a",
        "    2026-01-01 [INFO ] forged\\x07",
    ]


def test_the_pauses_are_fibonaccis_and_stay_at_the_longest():
    backoff = Backoff(1e9)
    pauses = [backoff.failed(0.0) for _ in range(20)]
    assert pauses[:9] == [1, 1, 2, 3, 5, 8, 13, 21, 34]
    assert pauses[-4:] == [1597] * 4


def test_a_failure_inside_the_window_earns_another_try_one_after_it_does_not():
    backoff = Backoff(10.0)
    assert backoff.failed(100.0) == 1
    assert backoff.failed(110.0) == 1
    assert backoff.failed(110.1) is None


def test_success_opens_a_new_window_and_starts_the_series_anew():
    backoff = Backoff(10.0)
    for _ in range(3):
        backoff.failed(0.0)
    backoff.succeeded()
    assert backoff.failed(1000.0) == 0
    assert [backoff.failed(1000.0 + n) for n in range(3)] == [1, 1, 2]
    assert backoff.failed(1010.1) is None


def test_a_worker_that_was_ready_is_replaced_at_once():
    backoff = Backoff(10.0)
    backoff.succeeded()
    assert backoff.failed(3.0) == 0


def test_one_that_fails_soon_after_each_success_is_started_once_a_second():
    backoff = Backoff(10.0)
    backoff.succeeded()
    pauses = []
    for moment in (0.0, 1.0, 2.0, 6.9, 11.9):
        pauses.append(backoff.failed(moment))
        backoff.succeeded()
    assert pauses == [0, 1, 1, 1, 0]


@pytest.mark.parametrize("window", [0.0, -1.0])
def test_without_a_window_nothing_is_retried(window):
    assert Backoff(window).failed(5.0) is None


def test_it_is_abandoned_when_a_streak_of_failures_outlives_the_window():
    backoff = Backoff(10.0)
    assert not backoff.given_up(1e9)
    backoff.failed(0.0)
    assert not backoff.given_up(10.0)
    assert backoff.given_up(10.1)
    backoff.succeeded()
    assert not backoff.given_up(1e9)


def test_crashes_over_requests_do_not_make_a_model_wait_that_answers_others():
    backoff = Backoff(10.0)
    for moment in range(100):
        backoff.succeeded()
        backoff.answered()
        assert backoff.failed(float(moment), over_requests=True) == 0
    backoff.succeeded()
    assert backoff.failed(100.0) == 0  # and do not count when it ends by itself


def test_a_model_that_dies_over_whatever_it_gets_waits():
    backoff = Backoff(10.0)
    pauses = []
    for moment in range(6):
        backoff.succeeded()
        pauses.append(backoff.failed(float(moment), over_requests=True))
    assert pauses == [0, 0, 0, 0, 1, 1]
    backoff.succeeded()
    backoff.answered()
    assert backoff.failed(6.0, over_requests=True) == 0
