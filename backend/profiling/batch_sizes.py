"""Measures the time and memory of a batch of each size.

Sizes are run smallest first: one run to warm up (lazy initialisation, caches, compilation), then up
to three whose median counts. Profiling ends early for one of these reasons:

* time     the next size would not fit into the time that is left, or would take longer than a run
           may. Only the first size is always measured.
* memory   the next size would not fit into memory, or a size ran out of it. Some is left over,
           since allocators round up and workers beside this one grow as well.
* gain     throughput (requests per second) gained too little, twice in a row, the last time at 16
           or more. Smaller sizes are not enough: from 2 on torch may use several threads. On a busy
           machine these wait for each other, which can take as long as ten rows.
* failure  a run failed. Of the first size the sample may be the cause, so the model is not blamed.
"""

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from operator import attrgetter

from marserve.backend.profiling.memory import Memory
from marserve.backend.profiling.samples import failed_status
from marserve.backend.protocol import BatchCost, Profiled, Reply

_TIMED_RUNS = 3
_MIN_GAIN = 0.03
_MAX_WITHOUT_GAIN = 2
_MIN_LAST_SIZE = 16
_USABLE_SHARE = 0.9
_OUT_OF_MEMORY = 507
_MIN_SECONDS = 1e-9  # two readings of a clock may be equal

Clock = Callable[[], float]


class _Ended(Exception):
    """Profiling has ended; the message is the reason."""

    def __init__(self, note: str, too_large: int = 0) -> None:
        super().__init__(note)
        self.too_large = too_large


class SizeProfiler:
    """Measures size after size, one run at a time; ``found`` has the costs so far.

    Args:
        run_batch: Runs a batch of this size.
        memory: The memory that the batches use.
        clock: Returns seconds.
        seconds: The time for all runs.
        longest: The seconds of a run from which on it is not started, except for the first size.
    """

    def __init__(
        self,
        run_batch: Callable[[int], Reply],
        memory: Memory,
        clock: Clock,
        seconds: float,
        longest: float = math.inf,
    ) -> None:
        self.found = Profiled()
        self._run_batch = run_batch
        self._memory = memory
        self._clock = clock
        self._seconds = seconds
        self._longest = longest
        self._spent = 0.0
        self._best = 0.0  # requests per second
        self._without_gain = 0

    def runs(self, sizes: Iterable[int]) -> Iterator[None]:
        """Do one run of these sizes at each step."""
        try:
            for size in sorted(set(sizes)):
                yield from self._measure(size)
        except _Ended as end:
            self.found.note, self.found.too_large = str(end), end.too_large

    def _measure(self, size: int) -> Iterator[None]:
        costs = self.found.costs
        if costs:
            self._check_gain(costs[-1].size)
            self._check_memory(size)
            self._check_time(size, 2)  # one to warm up, one that counts
        self._memory.reset_peak()
        seconds = yield from self._median_seconds(size)
        costs.append(BatchCost(size, seconds, self._memory.peak()))
        throughput = size / seconds
        has_gained = throughput >= self._best * (1 + _MIN_GAIN)
        self._without_gain = 0 if has_gained else self._without_gain + 1
        self._best = max(self._best, throughput)

    def _check_gain(self, last: int) -> None:
        if self._without_gain >= _MAX_WITHOUT_GAIN and last >= _MIN_LAST_SIZE:
            raise _Ended(
                f"throughput gained less than {_MIN_GAIN:.0%} at the last {_MAX_WITHOUT_GAIN} sizes"
            )

    def _check_memory(self, size: int) -> None:
        available = self._memory.available()
        if available is None:
            return
        peak = self._predict(attrgetter("peak_bytes"), size)
        if peak > _USABLE_SHARE * available:
            raise _Ended(
                f"size {size} would take about {_mib(peak)}, and there are {_mib(available)}", size
            )

    def _check_time(self, size: int, runs: int) -> None:
        seconds = self._predict(attrgetter("seconds"), size)
        if seconds > self._longest:
            raise _Ended(f"size {size} would take about {seconds:.2g} s, too long in between")
        if not self._has_time(runs * seconds):
            raise _Ended(f"size {size} did not fit the {self._seconds:g} s of profiling")

    def _has_time(self, seconds: float) -> bool:
        return self._spent + seconds <= self._seconds

    def _predict(self, cost_of: Callable[[BatchCost], float], size: int) -> float:
        """Predict a cost on the line through the last two sizes, or through 0 and the only one."""
        known = [(0, 0.0), *((cost.size, cost_of(cost)) for cost in self.found.costs)]
        (before, low), (last, high) = known[-2:]
        return high + max(0.0, (high - low) / (last - before)) * (size - last)

    def _median_seconds(self, size: int) -> Generator[None, None, float]:
        self._run(size)
        yield
        if self.found.costs:  # compiling may have made the warm-up far longer than predicted
            self._check_time(size, 1)
        times = [self._run(size)]
        yield
        while len(times) < _TIMED_RUNS and self._has_time(times[-1]):
            times.append(self._run(size))
            yield
        return sorted(times)[len(times) // 2]

    def _run(self, size: int) -> float:
        started = self._clock()
        too_large = size if self.found.costs else 0
        try:
            reply = self._run_batch(size)
        except (Exception, SystemExit) as error:
            raise _Ended(f"size {size} failed: {error!r}", too_large) from error
        finally:
            seconds = self._clock() - started
            self._spent += seconds
        statuses = [reply.code, *(prediction.status for prediction in reply.predictions)]
        if _OUT_OF_MEMORY in statuses:
            raise _Ended(f"size {size} ran out of memory", size)
        if status := failed_status(reply):  # to refuse a sample costs next to nothing
            reason = f": {reply.message}" if reply.message else ""
            raise _Ended(f"size {size} failed with status {status}{reason}", too_large)
        return max(_MIN_SECONDS, seconds)


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"
