from collections.abc import Callable

import pytest

from marserve.backend.profiling.thread_counts import Undecided, fewest_threads, free_cores


class Machine:
    """Runs that take as long as they are said to with so many threads."""

    def __init__(self, seconds: Callable[[int], float], cores: list[float] | None = None) -> None:
        self.now = 100.0
        self.threads = 0
        self.runs: list[int] = []
        self._seconds = seconds
        self._cores = cores or []

    def run(self) -> None:
        self.runs.append(self.threads)
        self.now += self._seconds(self.threads)

    def set_count(self, count: int) -> None:
        self.threads = count

    def cores(self, count: int) -> float:
        return self._cores.pop(0) if self._cores else float(count)

    def fewest(self, *counts: int) -> tuple[int, str]:
        return fewest_threads(counts, self.run, self.set_count, self.cores, lambda: self.now)


def test_small_operations_do_with_one_thread():
    machine = Machine(lambda threads: 0.001 * (1 + 0.02 * threads))
    assert machine.fewest(1, 2, 4) == (
        1,
        "tried: a batch took 1.02 ms with 1, 1.04 ms with 2, 1.08 ms with 4",
    )


def test_large_ones_get_as_many_as_still_gain():
    assert Machine(lambda threads: 0.008 / threads).fewest(1, 2, 4)[0] == 4
    assert Machine(lambda threads: 0.008 / min(threads, 2)).fewest(1, 2, 4)[0] == 2


def test_numbers_take_turns():
    machine = Machine(lambda _threads: 0.01)
    machine.fewest(1, 2)
    assert machine.runs[:7] == [2, 2, 2, 1, 1, 2, 2]


def test_it_takes_about_a_second():
    machine = Machine(lambda threads: 0.05 / threads)
    machine.fewest(1, 2)
    assert machine.now - 100 < 1.5


def test_long_batches_are_not_tried():
    machine = Machine(lambda threads: 0.5 / threads)
    with pytest.raises(Undecided, match=r"a batch takes 0.25 s, too long to try fewer"):
        machine.fewest(1, 2)
    assert set(machine.runs) == {2}
    machine = Machine(lambda _threads: 1.5)
    with pytest.raises(Undecided, match=r"a batch took 1.5 s, too long to try fewer"):
        machine.fewest(1, 2)
    assert len(machine.runs) == 1


@pytest.mark.parametrize("cores", [[2.0, 1.1], [1.1, 2.0]])
def test_a_busy_machine_decides_nothing(cores):
    """Beside others two threads are no faster than one, for whatever model."""
    with pytest.raises(Undecided, match=r"others left 1.1 of 2 cores"):
        Machine(lambda _threads: 0.01, cores).fewest(1, 2)


def test_the_free_cores_are_measured():
    assert 0 < free_cores(1) <= 1.1
