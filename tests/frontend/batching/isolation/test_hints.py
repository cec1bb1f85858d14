import pytest

from marserve.frontend.batching.isolation.hints import Hints

LINE = "handler.py:3 ValueError"


@pytest.fixture
def hints():
    return Hints()


def test_an_unknown_line_is_followed_and_not_believed(hints):
    assert hints.follows(LINE)
    assert not hints.believes(LINE)


def test_no_line_is_not_followed(hints):
    assert not hints.follows("")


def test_a_line_that_was_mostly_right_is_followed(hints):
    hints.was_wrong(LINE)
    assert not hints.follows(LINE)
    for _ in range(8):
        hints.was_right(LINE)
    assert hints.follows(LINE)


def test_a_line_that_was_always_right_is_believed_seven_times_of_eight(hints):
    for _ in range(15):
        hints.was_right(LINE)
    assert not hints.believes(LINE)
    hints.was_right(LINE)
    assert sum(hints.believes(LINE) for _ in range(80)) == 70


def test_a_line_that_was_wrong_once_is_never_believed(hints):
    hints.was_wrong(LINE)
    for _ in range(1000):
        hints.was_right(LINE)
    assert not any(hints.believes(LINE) for _ in range(80))


def test_how_often_hints_are_of_use_is_learnt(hints):
    for _ in range(99):
        hints.follows(LINE)
        hints.was_right(LINE)
        hints.believes(LINE)
    assert hints.hinted == pytest.approx(1.0, abs=0.01)
    assert hints.checked == pytest.approx(1 / 8, abs=0.1)


def test_memory_is_bounded(hints):
    hints.was_wrong(LINE)
    for number in range(64):
        hints.was_right(f"handler.py:{number} KeyError")
    assert hints.follows(LINE)
