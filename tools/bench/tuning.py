"""``marserve bench --tune``: the settings with the most throughput within a latency goal.

Decisions only: what they are about is measured by whoever calls. The search has two halves.

**How much.** For each number of workers (and of threads of torch and batches outstanding, where
some are named), batch sizes rise by powers of two and one and a half of
them (1, 2, 3, 4, 6, 8, 12, ...). Each is measured in a closed loop with two batches per worker, one
that runs and one that waits: by Little's law a request then takes twice as long as a batch, which
is how long one takes that just missed a batch, and the worker is never idle. So the largest size
that keeps to the goal there is the largest with 2 l(b) <= D, as in Nexus (SOSP 2019). A size that
gains less than 3 % or misses the goal is a strike; two in a row end the sweep. What would count
against a size is measured twice. What is chosen is
the knee: the fewest workers, then the smallest batch, with 95 % of the best throughput.

**How to wait.** Under full load batches are full, and neither window nor policy matters. They do
below it, so they are compared in an open loop at 80 % of the throughput found. The winner is
measured at full load and confirmed by one more open loop. A size that cannot keep to the goal there
gives way to one that was faster by as much as was missing.

Triton's Model Analyzer searches the same space by a grid over concurrency; two batches per worker
stand for its maximum at a tenth of the runs.
"""

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from marserve.tools.bench.measurement import Measurement, Point
from marserve.tools.bench.recommendation import (
    CONFIRMED_SHARE,
    Choice,
    Goal,
    Recommendation,
    Trial,
)

#: Sets a point up and measures there.
Measure = Callable[[Point], Awaitable[Measurement]]

_KNEE = 0.95
_GAIN = 1.03
_STRIKES = 2
# Runs of the same thing differ by so much; a way to wait may be slower by it at full load.
_SAME = 0.9
# Among ways as good as this the adaptive policy is taken: it refuses in time what would be late.
_TIE = 1.1
# Windows that are tried, whole milliseconds as TorchServe takes them. Not 0: there it means two
# requests at most, and `models=` passes over it; greedy is what it should be, where it is known.
_DELAYS_MS = (1, 2, 5, 10, 20, 50, 100, 200)
# Of the goal: a longer window leaves too little for the batch itself.
_LONGEST_WINDOW = 0.5
_SWEEP_WINDOW = 0.1
_MAX_CANDIDATES = 4
# Times the goal, where runs had errors and nobody knows.
_MISSED_BY = 1.25
_SHARE = f"{CONFIRMED_SHARE:.0%}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What may be tried.

    Attributes:
        max_batch_size: The largest batch.
        max_workers: The most workers.
        is_adaptive: Whether the server has marserve's policies; TorchServe has fixed windows only.
        queue_size: Seats in the model's queue: no more requests are left waiting.
        allowed_error_share: Of all requests of a run, from 0 to 1.
        precision: What every measurement is taken in; None is "as it was".
        torch_threads: The numbers of threads to try; none is "as it was".
        outstanding_batches: Likewise, of batches that a worker is sent ahead.
    """

    max_batch_size: int = 128
    max_workers: int = 1
    is_adaptive: bool = False
    queue_size: int = 100
    allowed_error_share: float = 0.0
    precision: str | None = None
    torch_threads: Sequence[int] = ()
    outstanding_batches: Sequence[int] = ()


async def tune(goal: Goal, limits: Limits, measure: Measure) -> Recommendation:
    """Search for the settings with the most throughput within a goal.

    Args:
        goal: What is wanted.
        limits: What may be tried.
        measure: Sets a point up and measures there; what it raises ends the search.
    """
    search = _Search(goal, limits, measure)
    choice = await search.run()
    return Recommendation(goal, choice, search.trials, search.reasons)


class _Search:
    def __init__(self, goal: Goal, limits: Limits, measure: Measure) -> None:
        self.trials: list[Trial] = []
        self.reasons: dict[Point, str] = {}
        self._goal = goal
        self._limits = limits
        self._measure = measure

    async def run(self) -> Choice | None:
        limits = self._limits
        ways = product(limits.torch_threads or (None,), limits.outstanding_batches or (None,))
        for torch_threads, outstanding_batches in ways:
            await self._sweep_workers(
                Point(torch_threads=torch_threads, outstanding_batches=outstanding_batches)
            )
        candidates = _by_preference(self._candidates())
        for _ in range(_MAX_CANDIDATES):
            if not candidates:
                break
            tried, *candidates = candidates
            choice, enough_ms = await self._confirm(tried.run)
            if choice:
                return choice
            self.reasons[tried.run.point] = f"misses the goal at {_SHARE} of its throughput"
            candidates = self._faster(candidates, enough_ms)
        for candidate in candidates:
            self.reasons[candidate.run.point] = "was not tried in an open loop: others were better"
        return None

    def _candidates(self) -> list[Trial]:
        """Of every point that keeps to the goal, the best run."""
        best: dict[Point, Trial] = {}
        for trial in sorted(self.trials, key=self._latency_or_never, reverse=True):
            best[trial.run.point] = trial
        return [item for item in best.values() if not item.fault]

    def _faster(self, candidates: Sequence[Trial], latency_ms: float) -> list[Trial]:
        """Those within a latency; the others would miss the goal as well."""
        for candidate in candidates:
            if self._latency(candidate) > latency_ms:
                self.reasons[candidate.run.point] = (
                    "too slow for an open loop, as another has shown"
                )
        return [item for item in candidates if self._latency(item) <= latency_ms]

    async def _try(self, point: Point, *, more_than: float = 0.0) -> Trial:
        """Measure, and again where what was found would count against the point.

        Whatever disturbs a machine makes it slower, never faster: of two runs the faster is nearer
        to the truth. Runs with errors are not repeated: a server has a reason to refuse.

        Args:
            point: What to set.
            more_than: The throughput that would count for it.
        """
        first = await self._try_once(point)
        if first.is_useless or (not first.fault and first.run.throughput > more_than):
            return first
        second = await self._try_once(point)
        return first if second.is_useless else min(first, second, key=self._latency)

    async def _try_once(self, point: Point) -> Trial:
        run = await self._measure(point)
        trial = Trial.judged(run, self._goal, self._limits.allowed_error_share)
        self.trials.append(trial)
        return trial

    # -- how much ----------------------------------------------------------------------------------

    async def _sweep_workers(self, registered: Point) -> None:
        """Try workers and sizes with what else a registration says."""
        best, strikes = 0.0, 0
        for workers in sizes(self._limits.max_workers):
            throughput = await self._sweep_sizes(workers, registered)
            strikes = 0 if throughput > best * _GAIN else strikes + 1
            best = max(best, throughput)
            if strikes == _STRIKES:
                break

    async def _sweep_sizes(self, workers: int, registered: Point) -> float:
        """Returns the best throughput within the goal, 0 where nothing meets it."""
        best, strikes = 0.0, 0
        for size in sizes(self._limits.max_batch_size):
            point = self._full_load(self._sweep_point(workers, size, registered))
            trial = await self._try(point, more_than=best * _GAIN)
            throughput = 0.0 if trial.fault else trial.run.throughput
            strikes = 0 if throughput > best * _GAIN else strikes + 1
            best = max(best, throughput)
            if strikes == _STRIKES:
                break
        return best or await self._without_queue(workers, registered)

    async def _without_queue(self, workers: int, registered: Point) -> float:
        """One request per worker and none that waits: where two are too slow, one may do."""
        point = replace(self._sweep_point(workers, 1, registered), clients=workers)
        trial = await self._try(point)
        return 0.0 if trial.fault else trial.run.throughput

    def _sweep_point(self, workers: int, size: int, registered: Point) -> Point:
        windows = self._windows(_SWEEP_WINDOW)
        return replace(
            registered,
            workers=workers,
            batch_size=size,
            max_batch_delay_ms=windows[-1],
            batch_policy="fixed" if self._limits.is_adaptive else None,
            precision=self._limits.precision,
        )

    def _full_load(self, point: Point) -> Point:
        assert point.workers is not None
        assert point.batch_size is not None
        running = point.workers * point.batch_size
        return replace(point, clients=running + min(running, self._limits.queue_size), rate=None)

    # -- how to wait -------------------------------------------------------------------------------

    async def _confirm(self, full: Measurement) -> tuple[Choice | None, float]:
        """Choose how to wait, measure and confirm it.

        Returns:
            The choice; without one, the latency at full load that others need to do better,
            milliseconds.
        """
        ways = await self._ways(replace(full.point, clients=None, rate=_share_of(full)))
        good = sorted((item for item in ways if not item.fault), key=self._worth)
        for way in good:
            choice = await self._confirmed(way.run.point, full)
            if choice:
                self._explain_tie(way, good)
                return choice, 0.0
        return None, await self._enough(full, ways)

    async def _enough(self, full: Measurement, ways: Sequence[Trial]) -> float:
        """What others need after these have failed, milliseconds at full load.

        Where the throughput was luck, its open loops were overloaded, and tell nothing of others.
        """
        again = await self._try_once(full.point)
        if again.run.throughput < _KNEE * full.throughput:
            return math.inf
        known = [self._latency(way) for way in ways if not way.is_useless]
        missed_by = min(known) / self._goal.latency_ms if known else _MISSED_BY
        return self._goal.latency_of(full) / max(1.0, missed_by)

    async def _confirmed(self, point: Point, full: Measurement) -> Choice | None:
        saturating = replace(point, clients=full.point.clients, rate=None)
        enough = _SAME * full.throughput
        if saturating == full.point:
            saturated = full
        else:
            saturated = (await self._try(saturating, more_than=enough)).run
        if self._is_useless(saturated) or saturated.throughput < enough:
            self.reasons[point] = self.reasons[saturating] = "cannot do as much at full load"
            return None
        # Once: of two, the better would be luck.
        confirmed = await self._try_once(replace(point, rate=_share_of(saturated)))
        if confirmed.fault:
            self.reasons[point] = "a second run did not confirm it"
            return None
        return Choice(saturated, confirmed.run)

    def _explain_tie(self, chosen: Trial, good: Sequence[Trial]) -> None:
        for item in good:
            if self._latency(item) < self._latency(chosen) and item.run.point not in self.reasons:
                self.reasons[item.run.point] = "hardly faster than adaptive, which refuses in time"

    def _is_useless(self, run: Measurement) -> bool:
        return bool(run.failure(self._limits.allowed_error_share))

    def _latency(self, trial: Trial) -> float:
        return self._goal.latency_of(trial.run)

    def _worth(self, trial: Trial) -> float:
        """Smaller is better."""
        return self._latency(trial) / (_TIE if trial.run.point.max_latency_ms else 1)

    async def _ways(self, point: Point) -> list[Trial]:
        """Try the ways to wait under the load of a point."""
        has_policies = self._limits.is_adaptive
        ways = [await self._try(policy) for policy in self._policies(point)] if has_policies else []
        windows: list[Trial] = []
        for window in self._windows(_LONGEST_WINDOW) if point.batch_size != 1 else ():
            windows.append(await self._try(replace(point, max_batch_delay_ms=window)))
            best = min(range(len(windows)), key=lambda at: self._latency_or_never(windows[at]))
            if len(windows) - 1 - best == _STRIKES:
                break  # longer ones only make it worse
        return [*ways, *windows] or [await self._try(point)]

    def _policies(self, point: Point) -> tuple[Point, Point]:
        """What marserve has beside windows: no waiting, and as much as the load calls for."""
        return self._adaptive(point), replace(point, batch_policy="greedy", max_batch_delay_ms=None)

    def _adaptive(self, point: Point) -> Point:
        return replace(
            point,
            batch_policy="adaptive",
            max_batch_delay_ms=self._windows(_LONGEST_WINDOW)[-1],
            max_latency_ms=max(1, int(self._goal.latency_ms)),  # the server takes whole ones
        )

    def _latency_or_never(self, trial: Trial) -> float:
        return math.inf if trial.is_useless else self._latency(trial)

    def _windows(self, share: float) -> tuple[int, ...]:
        longest_ms = share * self._goal.latency_ms
        return tuple(delay for delay in _DELAYS_MS if delay <= longest_ms) or _DELAYS_MS[:1]


def _share_of(full: Measurement) -> float:
    """The rate of the open loop that belongs to a full load, to three digits."""
    return float(f"{CONFIRMED_SHARE * full.throughput:.3g}")


def sizes(largest: int) -> list[int]:
    """Powers of two and one and a half of them, up to a size, and that size."""
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return sorted({*(power for power in (*powers, *between) if power <= largest), largest})


def _by_preference(trials: Sequence[Trial]) -> list[Trial]:
    """The knee first, then whatever has most throughput."""
    good = sorted(trials, key=lambda item: -item.run.throughput)
    enough = [item for item in good if item.run.throughput >= _KNEE * good[0].run.throughput]
    knee = sorted(enough, key=lambda value: (value.run.point.workers, value.run.point.batch_size))
    return [*knee, *good[len(enough) :]]
