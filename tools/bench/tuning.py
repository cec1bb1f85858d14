"""``marserve bench --tune``: the settings with the most throughput within a latency goal.

The module decides which point is measured next; the caller measures. The search has two phases.

**Workers and batch size.** For each number of workers (and each given number of torch threads and
outstanding batches), batch sizes rise through the powers of two and one and a half of them (1, 2,
3, 4, 6, 8, 12, ...). Each is measured in a closed loop with two batches per worker, one running and
one waiting. By Little's law a request then takes twice as long as a batch l(b), as one that just
missed a batch does, and the worker is never idle. The largest size within the goal D is therefore
the largest with 2 l(b) <= D, as in Nexus (SOSP 2019). A size that gains less than 3 % or misses the
goal is a strike; two strikes in a row end the sweep. An unfavourable result is measured twice. The
choice is the knee: the fewest workers, then the smallest batch, with 95 % of the best throughput.

**Batch policy and delay.** Under full load batches are full, and neither delay nor policy matters.
They are therefore compared in an open loop at 80 % of that throughput. The best one is measured at
full load and confirmed by another open loop. If a size misses the goal in the open loop, the next
candidate must have been faster at full load by the factor that was missing. If none meets it, the
first one is tried at 50 %. If that misses it, too, the first one is recommended as unconfirmed,
with the policy and delay that came nearest.

A refusal misses the goal: p99 allows one request in a hundred to be refused or late. A point whose
settings cannot be applied, or that cannot be measured, is rejected with the error.

Triton's Model Analyzer searches the same space by a grid over concurrency; two batches per worker
replace its maximum over this grid, with a tenth of the runs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.measurement import Measurement, Point
from marserve.tools.bench.recommendation import (
    CONFIRMED_SHARE,
    LOWER_SHARE,
    Choice,
    Goal,
    Recommendation,
    Trial,
)

#: Applies the settings of a point and measures it.
Measure = Callable[[Point], Measurement]

_KNEE = 0.95
_GAIN = 1.03
_STRIKES = 2
# Equal runs differ by up to 10 %; the throughput of a policy at full load may be lower by that.
_SAME = 0.9
# The adaptive policy is preferred within 10 % of the best latency: it refuses late requests early.
_TIE = 1.1
# Batch delays to try, in whole milliseconds as TorchServe requires. Not 0: TorchServe then limits a
# batch to two requests, and ignores 0 in `models=`; in marserve the policy "greedy" replaces it.
_DELAYS_MS = (1, 2, 5, 10, 20, 50, 100, 200)
# Longest delays as shares of the goal; a longer one leaves too little time for the batch.
_LONGEST_WINDOW = 0.5
_SWEEP_WINDOW = 0.1
_MAX_CANDIDATES = 4
# Assumed ratio of latency to goal if all open loops failed.
_MISSED_BY = 1.25
_SHARE = f"{CONFIRMED_SHARE:.0%}"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of the search.

    Attributes:
        max_batch_size: Largest batch size.
        max_workers: Largest number of workers.
        is_adaptive: Whether the server has marserve's policies; TorchServe has fixed delays only.
        queue_size: Capacity of the model's queue, which limits the waiting requests.
        allowed_error_share: Largest accepted share of failed requests of a run, from 0 to 1.
        precision: Precision of all measurements; None leaves it unchanged.
        torch_threads: Numbers of torch threads to try; empty leaves it unchanged.
        outstanding_batches: Numbers of outstanding batches to try; empty leaves it unchanged.
    """

    max_batch_size: int = 128
    max_workers: int = 1
    is_adaptive: bool = False
    queue_size: int = 100
    allowed_error_share: float = 0.0
    precision: str | None = None
    torch_threads: Sequence[int | str] = ()
    outstanding_batches: Sequence[int] = ()


def tune(goal: Goal, limits: Limits, measure: Measure) -> Recommendation:
    """Search for the settings with the most throughput within a goal.

    Args:
        goal: The latency goal.
        limits: The limits of the search.
        measure: Measures a point.

    Raises:
        BenchError: The first point cannot be measured, or the server is gone.
    """
    search = _Search(goal, limits, measure)
    choice = search.run()
    return Recommendation(goal, choice, search.trials, search.reasons)


class _Search:
    def __init__(self, goal: Goal, limits: Limits, measure: Measure) -> None:
        self.trials: list[Trial] = []
        self.reasons: dict[Point, str] = {}
        self._goal = goal
        self._limits = limits
        self._measure = measure

    def run(self) -> Choice | None:
        limits = self._limits
        ways = product(limits.torch_threads or (None,), limits.outstanding_batches or (None,))
        for torch_threads, outstanding_batches in ways:
            self._sweep_workers(
                Point(torch_threads=torch_threads, outstanding_batches=outstanding_batches)
            )
        candidates = _by_preference(self._candidates())
        if not candidates:
            return None
        first = candidates[0].run
        return (
            self._confirm_one_of(candidates)
            or self._confirm(first, LOWER_SHARE)[0]
            or Choice(first, None, self._nearest_open_loop(first.point))
        )

    def _nearest_open_loop(self, full: Point) -> Measurement | None:
        """Return the open loop of a size that comes nearest to the goal, with any policy."""
        runs = [
            trial.run
            for trial in self.trials
            if trial.run.point.rate is not None
            and not trial.is_useless
            and _without_policy(trial.run.point) == _without_policy(full)
        ]
        return min(runs, key=self._goal.distance, default=None)

    def _confirm_one_of(self, candidates: Sequence[Trial]) -> Choice | None:
        for _ in range(_MAX_CANDIDATES):
            if not candidates:
                break
            tried, *candidates = candidates
            choice, enough_ms = self._confirm(tried.run, CONFIRMED_SHARE)
            if choice:
                return choice
            self.reasons[tried.run.point] = f"misses the goal at {_SHARE} of its throughput"
            candidates = self._faster(candidates, enough_ms)
        for candidate in candidates:
            self.reasons[candidate.run.point] = "not tried in an open loop: others were better"
        return None

    def _candidates(self) -> list[Trial]:
        """Return the best trial of every point that meets the goal."""
        best: dict[Point, Trial] = {}
        for trial in sorted(self.trials, key=self._latency_or_never, reverse=True):
            best[trial.run.point] = trial
        return [item for item in best.values() if not item.fault]

    def _faster(self, candidates: Sequence[Trial], latency_ms: float) -> list[Trial]:
        """Return the candidates within a latency; the others would miss the goal as well."""
        for candidate in candidates:
            if self._latency(candidate) > latency_ms:
                self.reasons[candidate.run.point] = (
                    "too slow for an open loop, as another candidate has shown"
                )
        return [item for item in candidates if self._latency(item) <= latency_ms]

    def _try(self, point: Point, *, more_than: float = 0.0) -> Trial:
        """Measure a point, and a second time if the first result is unfavourable.

        Disturbances make a machine slower, never faster, so the faster of two runs is more exact.
        Failed runs are not repeated.

        Args:
            point: The load and the settings.
            more_than: Throughput above which a result is favourable, requests per second.
        """
        first = self._try_once(point)
        if first.is_useless or (not first.fault and first.run.throughput > more_than):
            return first
        second = self._try_once(point)
        return first if second.is_useless else min(first, second, key=self._latency)

    def _try_once(self, point: Point) -> Trial:
        try:
            run = self._measure(point)
        except BenchError as error:
            if not self.trials or isinstance(error, ServerUnreachable):
                raise
            nothing = Measurement(point=point, seconds=1.0, answers=0, latencies_ms=())
            trial = Trial(nothing, str(error), is_useless=True)
        else:
            trial = Trial.judged(run, self._goal, self._limits.allowed_error_share)
        self.trials.append(trial)
        return trial

    # -- workers and batch size --------------------------------------------------------------------

    def _sweep_workers(self, registered: Point) -> None:
        """Try numbers of workers and batch sizes with the other settings of a registration."""
        best, strikes = 0.0, 0
        for workers in sizes(self._limits.max_workers):
            throughput = self._sweep_sizes(workers, registered)
            strikes = 0 if throughput > best * _GAIN else strikes + 1
            best = max(best, throughput)
            if strikes == _STRIKES:
                break

    def _sweep_sizes(self, workers: int, registered: Point) -> float:
        """Return the best throughput within the goal; 0 if no size meets it."""
        best, strikes = 0.0, 0
        for size in sizes(self._limits.max_batch_size):
            point = self._full_load(self._sweep_point(workers, size, registered))
            trial = self._try(point, more_than=best * _GAIN)
            throughput = 0.0 if trial.fault else trial.run.throughput
            strikes = 0 if throughput > best * _GAIN else strikes + 1
            best = max(best, throughput)
            if strikes == _STRIKES:
                break
        return best or self._without_queue(workers, registered)

    def _without_queue(self, workers: int, registered: Point) -> float:
        """Try one request per worker without waiting requests, and return its throughput."""
        point = replace(self._sweep_point(workers, 1, registered), clients=workers)
        trial = self._try(point)
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
        assert isinstance(point.batch_size, int)
        running = point.workers * point.batch_size
        return replace(point, clients=running + min(running, self._limits.queue_size), rate=None)

    # -- batch policy and delay --------------------------------------------------------------------

    def _confirm(self, full: Measurement, share: float) -> tuple[Choice | None, float]:
        """Choose policy and delay, measure them at full load and confirm them.

        Args:
            full: A run at full load.
            share: Rate of the open loops as a share of the throughput at full load.

        Returns:
            The choice, and without one the latency at full load, milliseconds, that another
            candidate may have at most.
        """
        ways = self._try_policies(replace(full.point, clients=None, rate=_share_of(full, share)))
        good = sorted((item for item in ways if not item.fault), key=self._worth)
        for way in good:
            choice = self._confirmed(way.run.point, full, share)
            if choice:
                self._explain_tie(way, good)
                return choice, 0.0
        return None, self._enough(full, ways)

    def _enough(self, full: Measurement, ways: Sequence[Trial]) -> float:
        """Return the largest latency at full load of further candidates, milliseconds.

        It is unlimited if a second run has clearly less throughput: the rate of the open loops was
        then too high, and their latencies do not apply to others.
        """
        again = self._try_once(full.point)
        if again.run.throughput < _KNEE * full.throughput:
            return math.inf
        latencies = [self._latency_or_never(way) for way in ways]
        known = [latency for latency in latencies if latency < math.inf]
        missed_by = min(known) / self._goal.latency_ms if known else _MISSED_BY
        return self._latency_of(full) / max(1.0, missed_by)

    def _confirmed(self, point: Point, full: Measurement, share: float) -> Choice | None:
        saturating = replace(point, clients=full.point.clients, rate=None)
        enough = _SAME * full.throughput
        if saturating == full.point:
            saturated = full
        else:
            saturated = (self._try(saturating, more_than=enough)).run
        if self._is_useless(saturated) or saturated.throughput < enough:
            self.reasons[point] = self.reasons[saturating] = "less throughput at full load"
            return None
        # Only once: the better of two confirmations would be biased.
        confirmed = self._try_once(replace(point, rate=_share_of(saturated, share)))
        if confirmed.fault:
            self.reasons[point] = "not confirmed by a second run"
            return None
        return Choice(saturated, confirmed.run)

    def _explain_tie(self, chosen: Trial, good: Sequence[Trial]) -> None:
        for item in good:
            if self._latency(item) < self._latency(chosen) and item.run.point not in self.reasons:
                self.reasons[item.run.point] = "hardly faster than adaptive, which refuses early"

    def _is_useless(self, run: Measurement) -> bool:
        return bool(run.failure(self._limits.allowed_error_share))

    def _latency(self, trial: Trial) -> float:
        """Return the latency of a run; infinite with too many refusals, which shorten the queue."""
        if trial.fault and trial.run.refused:
            return math.inf
        return self._latency_of(trial.run)

    def _latency_of(self, run: Measurement) -> float:
        """Return the latency of a run; at full load, that with two batches for each worker.

        Where the queue does not take the second batches, it is measured with fewer.
        """
        latency, point = self._goal.latency_of(run), run.point
        if point.clients is None:
            return latency
        assert point.workers is not None
        assert isinstance(point.batch_size, int)
        return latency * 2 * point.workers * point.batch_size / point.clients

    def _worth(self, trial: Trial) -> float:
        """Return the sort key of policies; the smallest is the best."""
        return self._latency(trial) / (_TIE if trial.run.point.max_latency_ms else 1)

    def _try_policies(self, point: Point) -> list[Trial]:
        """Try all policies and delays under the load of a point."""
        has_policies = self._limits.is_adaptive
        ways = [self._try(policy) for policy in self._policies(point)] if has_policies else []
        windows: list[Trial] = []
        for window in self._windows(_LONGEST_WINDOW) if point.batch_size != 1 else ():
            windows.append(self._try(replace(point, max_batch_delay_ms=window)))
            best = min(range(len(windows)), key=lambda at: self._latency_or_never(windows[at]))
            if len(windows) - 1 - best == _STRIKES:
                break  # longer delays only increase the latency
        return [*ways, *windows] or [self._try(point)]

    def _policies(self, point: Point) -> tuple[Point, Point]:
        """Return the point with marserve's policies "adaptive" and "greedy"."""
        return self._adaptive(point), replace(point, batch_policy="greedy", max_batch_delay_ms=None)

    def _adaptive(self, point: Point) -> Point:
        return replace(
            point,
            batch_policy="adaptive",
            max_batch_delay_ms=self._windows(_LONGEST_WINDOW)[-1],
            max_latency_ms=max(1, int(self._goal.latency_ms)),  # a whole number
        )

    def _latency_or_never(self, trial: Trial) -> float:
        return math.inf if trial.is_useless else self._latency(trial)

    def _windows(self, share: float) -> tuple[int, ...]:
        longest_ms = share * self._goal.latency_ms
        return tuple(delay for delay in _DELAYS_MS if delay <= longest_ms) or _DELAYS_MS[:1]


def _without_policy(point: Point) -> Point:
    settings = {"batch_policy": None, "max_batch_delay_ms": None, "max_latency_ms": None}
    return replace(point, clients=None, rate=None, **settings)


def _share_of(full: Measurement, share: float) -> float:
    """Return the rate of the open loop for a throughput at full load, to three digits."""
    return float(f"{share * full.throughput:.3g}")


def sizes(largest: int) -> list[int]:
    """Return powers of two and one and a half of them up to a size, and that size."""
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    between = [3 * power // 2 for power in powers[1:]]
    return sorted({*(power for power in (*powers, *between) if power <= largest), largest})


def _by_preference(trials: Sequence[Trial]) -> list[Trial]:
    """Sort trials: first those at the knee, then the others by falling throughput."""
    good = sorted(trials, key=lambda item: -item.run.throughput)
    enough = [item for item in good if item.run.throughput >= _KNEE * good[0].run.throughput]
    knee = sorted(enough, key=lambda value: (value.run.point.workers, value.run.point.batch_size))
    return [*knee, *good[len(enough) :]]
