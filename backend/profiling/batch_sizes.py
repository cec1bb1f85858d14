"""Measures the time and memory of a batch of each size: at load, or later run by run.

The sizes are run smallest first over copies of one sample, through the same `Service.predict` as
traffic: one run to warm up (lazy initialisation, caches, compilation), then up to three whose
median counts. Profiling ends where going on is no use or no good, and says why:

* time     another size would not fit what is left of the budget. Only the first size is always
           measured, however long it takes: one run to warm up, one that counts.
* memory   another size would not fit what is left of it, or one has run out of it. Some room is
           left over, since allocators round up and workers beside this one grow as well.
* gain     throughput (requests per second) gained too little, twice in a row.
* failure  a run failed. The sample may be at fault, so the model is not blamed for it.

Costs are predicted on a line through the last two. A model for which they do not grow with size is
profiled a little too far or too short; nothing else depends on it.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from marserve.backend.profiling.memory import Memory, memory_of
from marserve.backend.profiling.warm_up import NoSample, failed_status, find_sample, predict_samples
from marserve.backend.protocol import Load, Reply
from marserve.backend.service import Service

logger = logging.getLogger(__name__)

_TIMED_RUNS = 3
_MIN_GAIN = 0.03
_MAX_WITHOUT_GAIN = 2
_USABLE_SHARE = 0.9
_OUT_OF_MEMORY = 507
_SECONDS, _PEAK = 1, 2  # columns of a row of costs
_MIN_SECONDS = 1e-9  # a clock may stand still between two looks

Clock = Callable[[], float]
RunBatch = Callable[[int], Reply]


@dataclass
class Findings:
    """What profiling found out: ``costs``, ``profiling_note`` and ``too_large`` of a `Reply`."""

    costs: list[list[Any]] = field(default_factory=list)
    note: str = ""
    too_large: int = 0

    def __str__(self) -> str:
        costs = ", ".join(f"{size} in {seconds * 1000:.3g} ms" for size, seconds, _ in self.costs)
        return " - ".join(filter(None, (costs or "none", self.note)))


class _Ended(Exception):
    """Profiling is over; the text says why."""

    def __init__(self, note: str, too_large: int = 0) -> None:
        super().__init__(note)
        self.too_large = too_large


def profile_model(load: Load, service: Service, clock: Clock = time.perf_counter) -> Findings:
    """Measure the sizes that a load asks for; whatever happens, the model stays loaded.

    The context of the service is afterwards as it was.
    """
    try:
        findings = _profile_service(load, service, clock)
    except NoSample as error:
        findings = Findings(note=str(error))
    except Exception:  # the model works as far as anybody knows: no reason not to serve it
        logger.warning("Profiling failed.", exc_info=True)
        findings = Findings(note="profiling failed; the model's log tells why")
    logger.info("Batch sizes profiled: %s", findings)
    return findings


def _profile_service(load: Load, service: Service, clock: Clock) -> Findings:
    if load.asynchronous:
        return Findings(note="a handler that is a coroutine gets its requests one by one")
    sample = find_sample(load.model_dir, load.sample_input, service.sample_input)
    memory = memory_of(load.gpu_id)
    run_batch = partial(predict_samples, service, sample)
    with service.without_traces():
        findings = profile(run_batch, load.profiled_sizes, load.profiling_seconds, memory, clock)
    memory.release()
    return findings


def profile(
    run_batch: RunBatch, sizes: Iterable[int], seconds: float, memory: Memory, clock: Clock
) -> Findings:
    """Measure what batches of these sizes, from 1, cost.

    ``seconds`` is the budget; only the first size, and a run longer than predicted, exceed it.
    """
    findings = Findings()
    for _ in profile_in_steps(findings, run_batch, sizes, seconds, memory, clock):
        pass
    return findings


def profile_in_steps(
    findings: Findings,
    run_batch: RunBatch,
    sizes: Iterable[int],
    seconds: float,
    memory: Memory,
    clock: Clock,
    longest: float = math.inf,
) -> Iterator[None]:
    """The same as an iterator of one run each, which add to ``findings``.

    After the first size no run is begun that is expected to take more than ``longest`` seconds.
    """
    profiler = _Profiler(findings.costs, run_batch, seconds, longest, memory, clock)
    try:
        for size in sorted(set(sizes)):
            yield from profiler.measure(size)
    except _Ended as end:
        findings.note, findings.too_large = str(end), end.too_large


class _Profiler:
    """Measures size after size."""

    def __init__(
        self,
        costs: list[list[Any]],
        run_batch: RunBatch,
        seconds: float,
        longest: float,
        memory: Memory,
        clock: Clock,
    ) -> None:
        self.costs = costs
        self._run_batch = run_batch
        self._memory = memory
        self._clock = clock
        self._seconds = seconds
        self._longest = longest
        self._spent = 0.0
        self._best = 0.0  # requests per second
        self._without_gain = 0

    def measure(self, size: int) -> Iterator[None]:
        """Add the row of a size, after several runs; `_Ended` if it is not to be run, or failed."""
        if self.costs:
            self._check_gain()
            self._check_memory(size)
            self._check_time(size, 2)  # one to warm up, one that counts
        self._memory.watch()
        seconds = yield from self._median_seconds(size)
        self.costs.append([size, seconds, self._memory.peak()])
        throughput = size / seconds
        has_gained = throughput >= self._best * (1 + _MIN_GAIN)
        self._without_gain = 0 if has_gained else self._without_gain + 1
        self._best = max(self._best, throughput)

    def _check_gain(self) -> None:
        if self._without_gain >= _MAX_WITHOUT_GAIN:
            raise _Ended(
                f"throughput gained less than {_MIN_GAIN:.0%} at the last {_MAX_WITHOUT_GAIN} sizes"
            )

    def _check_memory(self, size: int) -> None:
        room = self._memory.room()
        if room is None:
            return
        peak = self._predict(_PEAK, size)
        if peak > _USABLE_SHARE * room:
            raise _Ended(
                f"size {size} would take about {_mib(peak)}, and there are {_mib(room)}", size
            )

    def _check_time(self, size: int, runs: int) -> None:
        seconds = self._predict(_SECONDS, size)
        if seconds > self._longest:
            raise _Ended(f"size {size} would take about {seconds:.2g} s, too long in between")
        if not self._has_time(runs * seconds):
            raise _Ended(f"size {size} did not fit the {self._seconds:g} s of profiling")

    def _has_time(self, seconds: float) -> bool:
        return self._spent + seconds <= self._seconds

    def _predict(self, column: int, size: int) -> float:
        """A cost of a larger size, on the line through the last two; the first begins at 0."""
        known = [(0, 0.0), *((row[0], row[column]) for row in self.costs)]
        (before, low), (last, high) = known[-2:]
        return float(high + max(0.0, (high - low) / (last - before)) * (size - last))

    def _median_seconds(self, size: int) -> Generator[None, None, float]:
        """Run a size until it is known; of two runs the slower counts."""
        self._run(size)
        yield
        if self.costs:  # the warm-up may have taken far longer than predicted, to compile something
            self._check_time(size, 1)
        times = [self._run(size)]
        yield
        while len(times) < _TIMED_RUNS and self._has_time(times[-1]):
            times.append(self._run(size))
            yield
        return sorted(times)[len(times) // 2]

    def _run(self, size: int) -> float:
        started = self._clock()
        try:
            reply = self._run_batch(size)
        except (Exception, SystemExit) as error:
            raise _Ended(f"size {size} failed: {error!r}") from error
        finally:
            seconds = self._clock() - started
            self._spent += seconds
        _check_reply(reply, size)
        return max(_MIN_SECONDS, seconds)


def _check_reply(reply: Reply, size: int) -> None:
    """Make sure that the model was at work: refusing a sample costs next to nothing."""
    statuses = [reply.code, *(prediction.status for prediction in reply.predictions)]
    if _OUT_OF_MEMORY in statuses:
        raise _Ended(f"size {size} ran out of memory", size)
    if status := failed_status(reply):
        reason = f": {reply.message}" if reply.message else ""
        raise _Ended(f"size {size} failed with status {status}{reason}")


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f} MiB"
