import os
import signal
from pathlib import Path

import pytest

from marserve.frontend.workers.failures import Failure
from marserve.frontend.workers.launchers.post_mortem import (
    OomKills,
    StackFile,
    catches,
    exit_phrase,
)


@pytest.mark.parametrize(
    ("status", "phrase"),
    [
        (0, "ended with exit status 0"),
        (3, "ended with exit status 3"),
        (-signal.SIGSEGV, "was killed by SIGSEGV"),
        (-signal.SIGKILL, "was killed by SIGKILL"),
        (-35, "was killed by signal 35"),
    ],
)
def test_an_end_is_reported_by_its_status_or_the_name_of_its_signal(status, phrase):
    assert exit_phrase(status) == phrase


def test_each_process_that_the_kernel_killed_is_counted_for_one_worker():
    count = 5  # of those before us
    kills = OomKills(lambda: count)
    assert not kills.was_another()
    count = 7
    assert [kills.was_another() for _ in range(3)] == [True, True, False]
    count = 8
    assert kills.was_another()


def test_there_is_a_counter_on_this_machine():
    assert not OomKills().was_another()


def test_a_process_that_has_no_handler_for_a_signal_is_distinguished_from_one_that_has():
    earlier = signal.signal(signal.SIGUSR2, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, earlier)
    assert not catches(os.getpid(), signal.SIGUSR2)
    assert not catches(1 << 30, signal.SIGUSR2)


def test_what_was_written_to_a_file_of_stacks_outlives_it():
    stacks = StackFile()
    with Path(stacks.path).open("a") as file:
        file.write("Fatal Python error: Segmentation fault\n" + "  File x\n" * 100)
    assert stacks.size > 900
    stacks.close()
    assert len(stacks.lines()) == 50
    stacks.close()


@pytest.mark.parametrize(
    ("what", "cause", "reason"),
    [
        ("Worker disconnected.", "It ended.", "Worker disconnected. It ended."),
        ("No answer in time", "Timeout.", "No answer in time. Timeout."),
        ("ValueError: no", "", "ValueError: no"),
    ],
)
def test_a_reason_is_what_happened_and_why(what, cause, reason):
    assert Failure(what, cause, 0.0).reason == reason
