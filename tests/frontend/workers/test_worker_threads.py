"""The number of threads of a worker, over a connection that records what is sent."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.backend.protocol import Loaded, SetThreads, ThreadsSet
from marserve.frontend.workers.launchers.openmp import TorchOptions
from marserve.frontend.workers.worker_threads import ThreadChoice, WorkerThreads


class Connection:
    """Answers each change as a worker does that follows it."""

    def __init__(self, *, overlaps: int = 0) -> None:
        self.overlaps = overlaps
        self.lost = SimpleNamespace(done=lambda: False)
        self.sent: list[tuple[int, int]] = []

    def request(
        self, change: SetThreads, timeout: float | None, on_answer: Callable[[ThreadsSet], None]
    ) -> None:
        self.sent.append((change.before, change.count))
        on_answer(ThreadsSet(change.count))


def share(threads: int) -> TorchOptions:
    return TorchOptions(threads, f"its share: {threads}", is_share=True)


def started(threads: WorkerThreads, number: int = 0, why: str = "") -> WorkerThreads:
    """Give the number to a process, which loads with it, or finds another."""
    given = threads.give()
    threads.loaded(Loaded(threads=number or given, threads_why=why))
    return threads


def adjusted(threads: WorkerThreads, **options: Any) -> list[tuple[int, int]]:
    connection: Any = Connection(**options)
    threads.adjust(connection, 60.0)
    return connection.sent


def test_a_worker_uses_its_share_and_another_share_at_once():
    threads = started(WorkerThreads(share(4), [1, 2, 4]))
    assert threads.in_use == (4, "")
    assert adjusted(threads) == []
    threads.share_out(share(2), [1, 2])
    assert adjusted(threads) == [(4, 2)]
    assert threads.in_use == (2, "")
    assert (threads.tried, threads.options.threads, threads.give()) == ([1, 2], 2, 2)


def test_a_number_that_was_found_holds_for_the_next_process():
    threads = started(WorkerThreads(share(4), [1, 2, 4]), 2, "as fast as 4")
    assert threads.found == threads.in_use == (2, "as fast as 4")
    assert threads.give() == 2


@pytest.mark.parametrize(
    ("found", "new_share", "number", "kept"),
    [(2, 8, 2, True), (2, 1, 1, True), (4, 8, 8, False), (4, 2, 2, False)],
)
def test_a_number_is_kept_beside_another_share_if_it_is_smaller_than_the_old_one(
    found, new_share, number, kept
):
    threads = started(WorkerThreads(share(4), []), found, "found")
    threads.share_out(share(new_share), [])
    assert threads.found == (ThreadChoice(number, "found") if kept else None)
    assert threads.give() == number


@pytest.mark.parametrize("new", [share(4), TorchOptions(2, "its registration")])
def test_a_share_that_is_the_same_or_none_changes_nothing(new):
    threads = started(WorkerThreads(share(4), [1, 2, 4]))
    threads.share_out(new, [])
    assert (threads.give(), threads.tried) == (4, [1, 2, 4])


def test_a_handler_that_has_set_its_threads_or_has_no_torch_keeps_them():
    for in_use in (3, 0):
        threads = WorkerThreads(share(4), [])
        threads.give()
        threads.loaded(Loaded(threads=in_use))
        threads.share_out(share(2), [])
        assert adjusted(threads) == []
        assert threads.in_use == (in_use, "")


def test_overlapping_stages_keep_their_threads_until_the_next_start():
    threads = started(WorkerThreads(share(4), []))
    threads.share_out(share(2), [])
    assert adjusted(threads, overlaps=1) == []
    assert threads.give() == 2


def test_a_new_worker_uses_what_another_has_found():
    threads = WorkerThreads(share(4), [1, 2, 4], ThreadChoice(2, "found"))
    assert started(threads).in_use == (2, "found")
