"""When requests come: moments of arrival, seconds from the start, ascending.

All have the same mean rate; they differ in how they are crowded.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Moments = NDArray[np.float64]
#: Makes ``count`` arrivals at a mean ``rate`` per second out of a seed.
Workload = Callable[[float, int, int], Moments]

# A burst is about this long on average; between bursts the rate is this part of its mean.
_BURST_SECONDS = 0.25
_CALM = 0.5


def poisson(rate: float, count: int, seed: int) -> Moments:
    """Many clients that know nothing of each other."""
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def gamma(variation: float) -> Workload:
    """Gaps of a coefficient of variation: below 1 more regular than chance, above it crowded."""

    def arrivals(rate: float, count: int, seed: int) -> Moments:
        shape = variation**-2
        return np.cumsum(np.random.default_rng(seed).gamma(shape, 1 / (rate * shape), count))

    return arrivals


def bursty(factor: float) -> Workload:
    """Two-state MMPP: calm at half the mean rate, and bursts of ``factor`` times the mean.

    The share of time in a burst follows from the mean: 20 % for factor 3, 5.3 % for factor 10. A
    run of a few seconds sees few bursts; their lengths and those of the calms between are scaled
    so that it keeps the mean, or it would be a run at another load.
    """
    share = (1 - _CALM) / (factor - _CALM)

    def arrivals(rate: float, count: int, seed: int) -> Moments:
        rng = np.random.default_rng(seed)
        length = count / rate
        bursts = _summing_to(length * share, length * share / _BURST_SECONDS, rng)
        calms = _summing_to(length * (1 - share), len(bursts), rng)
        # The run begins somewhere in the first calm, and ends with what was left out of it.
        begun = calms[0] * rng.random()
        spans = np.stack([calms, bursts], axis=1).ravel()
        spans[0] -= begun
        speeds = rate * np.array([_CALM, factor] * len(bursts) + [_CALM])
        return _at_rates(np.append(spans, begun), speeds, count, rng)

    return arrivals


def _summing_to(total: float, count: float, rng: np.random.Generator) -> Moments:
    """About so many exponential lengths, at least one."""
    lengths = rng.exponential(1.0, max(1, round(count)))
    return lengths * (total / lengths.sum())


def trace_like(rate: float, count: int, seed: int) -> Moments:
    """Like the log of a service: a slow swing, a rate that wanders, and flash crowds of 2.5 times.

    The swing (30 %) goes once round in the run; the wandering is an AR(1) of the rate's logarithm,
    a step a second; a crowd stays for a second, or a tenth of a run that is shorter than ten.
    """
    rng = np.random.default_rng(seed)
    length = count / rate
    step = min(0.02, length / 500)
    moments = np.arange(0.0, 1.5 * length, step)
    speeds = 1 + 0.3 * np.sin(2 * np.pi * (moments / length + rng.random()))
    speeds *= np.exp(_wandering(int(moments[-1]) + 2, rng))[moments.astype(int)]
    crowd = min(1.0, length / 10)
    for start in rng.uniform(0.0, length, max(1, rng.poisson(length / 10))):
        speeds[(moments >= start) & (moments < start + crowd)] *= 2.5
    speeds *= rate / speeds[moments < length].mean()
    return _at_rates(np.full(len(moments), step), speeds, count, rng)


def _wandering(steps: int, rng: np.random.Generator) -> Moments:
    """AR(1) with a memory of 0.8 and a standard deviation of 0.2."""
    values = [rng.normal(0.0, 0.2)]
    for shock in rng.normal(0.0, 0.2 * (1 - 0.8**2) ** 0.5, steps - 1):
        values.append(0.8 * values[-1] + shock)
    return np.array(values)


def flash_crowds(rate: float, count: int, seed: int) -> Moments:
    """Three times a run, for a twenty-fifth of it, the rate is six times its mean."""
    rng = np.random.default_rng(seed)
    share, factor = 1 / 25, 6.0
    calm = (1 - 3 * share * factor) / (1 - 3 * share)
    crowd = share * count / rate
    rest = np.diff([0.0, *np.sort(rng.random(3)), 1.0]) * (count / rate - 3 * crowd)
    spans = np.array([rest[0], crowd, rest[1], crowd, rest[2], crowd, rest[3]])
    return _at_rates(spans, rate * np.array([calm, factor] * 3 + [calm]), count, rng)


def on_off(rate: float, count: int, seed: int) -> Moments:
    """Six sources that are on or off, for Pareto times of shape 1.5: their sum is self-similar.

    Each is on for a quarter of the time, at least for as long as twenty requests take to come.
    """
    rng = np.random.default_rng(seed)
    length, shortest = count / rate, 20 / rate
    changes: list[tuple[float, int]] = []
    for _ in range(6):
        now, is_on = -length * rng.random(), bool(rng.random() < 1 / 4)
        while now < length:
            if is_on:
                changes += [(max(0.0, now), 1)]
            now += shortest * (1 if is_on else 3) * (1 + rng.pareto(1.5))
            if is_on:
                changes += [(max(0.0, now), -1)]
            is_on = not is_on
    moments, steps_ = zip(*sorted(changes), strict=True)
    spans, active = np.diff([0.0, *moments]), np.cumsum([0, *steps_[:-1]])
    within = np.cumsum(spans) <= length
    speeds = np.maximum(active, 0.01) * count / max(1.0, float((active * spans)[within].sum()))
    return _at_rates(np.append(spans, 1.0), np.append(speeds, rate), count, rng)


def generated_trace(rate: float, count: int, seed: int) -> Moments:
    """Like logs of language models: a rate that wanders, and gaps of a coefficient of variation 2.

    The rate is an AR(1) in steps of a fiftieth of the run; arrivals within a step are bursty too.
    """
    rng = np.random.default_rng(seed)
    length = count / rate
    speeds = np.exp(2 * _wandering(50, rng))
    even = gamma(2.0)(1.0, count, seed)
    expected = np.concatenate(([0.0], np.cumsum(speeds * 50 / speeds.sum()))) * even[-1] / 50
    return np.interp(even, expected, np.linspace(0.0, length, 51))


def steps(rates: Sequence[float], seconds: Sequence[float], seed: int) -> Moments:
    """Poisson arrivals whose rate changes: so many seconds at each rate."""
    rng = np.random.default_rng(seed)
    expected = float(np.dot(rates, seconds))
    spans, speeds = np.array([*seconds, 1.0]), np.array([*rates, 2 * expected])
    arrivals = _at_rates(spans, speeds, int(expected * 1.5), rng)
    return arrivals[arrivals < sum(seconds)]


def _at_rates(spans: Moments, speeds: Moments, count: int, rng: np.random.Generator) -> Moments:
    """Poisson arrivals of a rate that is constant for each span (time rescaling)."""
    due = np.cumsum(rng.exponential(1.0, count))
    expected = np.concatenate(([0.0], np.cumsum(spans * speeds)))
    ends = np.concatenate(([0.0], np.cumsum(spans)))
    # Beyond the last span the last rate goes on.
    beyond = np.maximum(due - expected[-1], 0.0) / speeds[-1]
    return np.interp(due, expected, ends) + beyond


POISSON, MMPP3, MMPP10, TRACE = "Poisson", "MMPP 3", "MMPP 10", "trace-like"
FLASH, ON_OFF, GENERATED = "flash crowds", "on/off", "generated trace"
WORKLOADS: dict[str, Workload] = {
    POISSON: poisson,
    MMPP3: bursty(3),
    MMPP10: bursty(10),
    "gamma CV 0.5": gamma(0.5),
    "gamma CV 1": gamma(1),
    "gamma CV 4": gamma(4),
    TRACE: trace_like,
    FLASH: flash_crowds,
    ON_OFF: on_off,
    GENERATED: generated_trace,
}
