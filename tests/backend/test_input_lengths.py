import math
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from marserve.backend import input_lengths
from marserve.backend.input_lengths import FAILED, InputLengths

ROWS = [{"body": b"x" * count} for count in (1, 20, 3)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked(measure: Callable[[Any], Any], clock: Callable[[], float] | None = None) -> InputLengths:
    return InputLengths(lambda: measure, clock or Clock())


@pytest.fixture
def no_timer():
    """Without that of pytest's own timeout."""
    timer = signal.setitimer(signal.ITIMER_REAL, 0.0)
    yield
    signal.setitimer(signal.ITIMER_REAL, *timer)


def by_bytes(row: Any) -> int:
    return len(row["body"])


def test_what_the_handler_says_of_each_row():
    assert asked(by_bytes).of(ROWS) == [(0, 1.0), (1, 20.0), (2, 3.0)]


def test_a_handler_without_it_is_not_asked():
    assert InputLengths(lambda: None).of(ROWS) == []


def test_of_a_large_batch_only_some_rows_are_asked_about():
    rows = [{"body": b"x" * count} for count in range(32)]
    assert asked(by_bytes).of(rows) == [(0, 0.0), (8, 8.0), (16, 16.0), (24, 24.0)]


def test_it_takes_a_small_share_of_the_time():
    clock = Clock()

    def slow(row):
        clock.now += 0.01
        return by_bytes(row)

    lengths = asked(slow, clock)
    assert len(lengths.of(ROWS)) == 3  # 0.03 s
    clock.now += 1.0
    assert lengths.of(ROWS) == []
    clock.now += 1.0
    assert len(lengths.of(ROWS)) == 3


@pytest.mark.parametrize(
    "nonsense",
    [
        -1,
        math.nan,
        math.inf,
        "12",
        b"12",
        None,
        True,
        (1, 2),
        {},
        pytest.param(object(), id="object"),
        10**400,
        -math.inf,
        1e200,
        1e-200,
    ],
    ids=repr,
)
def test_nonsense_is_a_failure_and_nothing_worse(nonsense, caplog):
    clock = Clock()
    lengths = asked(lambda _row: nonsense, clock)
    assert lengths.of(ROWS) == [(0, FAILED)]
    assert "input_length failed" in caplog.text
    clock.now += 1.0
    assert lengths.of(ROWS) == []  # it is left alone for a while
    clock.now += 60.0
    assert lengths.of(ROWS) == [(0, FAILED)]


def test_numbers_of_other_libraries_are_numbers():
    numpy = pytest.importorskip("numpy")
    assert asked(lambda _row: numpy.int64(7)).of(ROWS[:1]) == [(0, 7.0)]


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), RecursionError()]
)
def test_what_it_raises_is_logged(error, caplog):
    def measure(_row):
        raise error

    assert asked(measure).of(ROWS) == [(0, FAILED)]
    assert "in measure" in caplog.text


def test_what_it_does_to_a_row_is_not_done_to_the_handlers():
    def measure(row):
        return len(row.pop("body"))

    assert asked(measure).of(ROWS)[0] == (0, 1.0)
    assert ROWS[0] == {"body": b"x"}


@pytest.mark.usefixtures("no_timer")
def test_one_that_hangs_is_interrupted(monkeypatch, caplog):
    monkeypatch.setattr(input_lengths, "_SECONDS", 0.05)
    before = signal.getsignal(signal.SIGALRM)

    def hang(_row):
        while True:
            try:
                time.sleep(5.0)
            except Exception:  # noqa: BLE001 - it does what it can to stay
                continue

    assert asked(hang).of(ROWS) == [(0, FAILED)]
    assert "took more than 0.05 s" in caplog.text
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.usefixtures("no_timer")
def test_a_timer_of_the_handlers_own_is_left_alone():
    signal.setitimer(signal.ITIMER_REAL, 50.0)
    assert asked(by_bytes).of(ROWS[:1]) == [(0, 1.0)]
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0


def test_in_another_thread_it_is_not_interrupted():
    found = []
    thread = threading.Thread(target=lambda: found.append(asked(by_bytes).of(ROWS[:1])))
    thread.start()
    thread.join()
    assert found == [[(0, 1.0)]]
