"""Rates, percentiles and failures of each model in the last minutes.

Samples of the counters are taken every five seconds: requests cost nothing, and the cost of a
sample depends on the number of models only.
"""

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.telemetry.metrics import SECONDS
from marserve.frontend.telemetry.model_metrics import FAILED

_PERIOD_SECONDS = 5.0
_SAMPLES = 61  # five minutes
_MINUTE_SAMPLES = 12


class _Sample(NamedTuple):
    at: float
    counts: Sequence[int]  # of answered requests, by the bounds `SECONDS`
    errors: Counter[str]


class Traffic(NamedTuple):
    """The requests of a model in the last minute; ``rates`` are of the last five minutes.

    Attributes:
        rates: Answered requests per second, in steps of five seconds, the newest last.
        percentiles: Seconds that 50, 95 and 99 % of the requests took at most; empty for none.
        errors: Requests without an answer of the handler, or with a failure, by reason.
    """

    answered: int
    per_second: float
    rates: Sequence[float]
    percentiles: Sequence[float]
    errors: Counter[str]


class TrafficHistory:
    """Samples of the counters of all models."""

    def __init__(
        self, models: Iterable[ModelVersion], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._clock = clock
        self._samples: WeakKeyDictionary[ModelVersion, deque[_Sample]] = WeakKeyDictionary()

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self.sample()
            await asyncio.sleep(_PERIOD_SECONDS)

    def sample(self) -> None:
        """Take a sample of each model."""
        for model in self._models:
            samples = self._samples.setdefault(model, deque(maxlen=_SAMPLES))
            samples.append(self._now(model))

    def of(self, model: ModelVersion) -> Traffic:
        """Return the traffic of a model until now."""
        now, samples = self._now(model), list(self._samples.get(model, ()))
        if not samples:  # it was registered since the last ones
            samples = [_Sample(now.at - _PERIOD_SECONDS, [0] * len(now.counts), Counter())]
        start = samples[-min(len(samples), _MINUTE_SAMPLES)]
        counts = [after - before for before, after in zip(start.counts, now.counts, strict=True)]
        # Of more than five seconds, where there are two samples.
        last = _rate(samples[-2 if len(samples) > 1 else -1], now)
        rates = [round(_rate(before, after), 2) for before, after in pairwise(samples)]
        percentiles = (
            [quantile(counts, share) for share in (0.5, 0.95, 0.99)] if any(counts) else ()
        )
        return Traffic(sum(counts), last, rates, percentiles, now.errors - start.errors)

    def _now(self, model: ModelVersion) -> _Sample:
        errors: Counter[str] = Counter()
        for (metric, reason), count in model.metrics.errors().items():
            is_late = metric == FAILED and reason == "expired"  # a worker had them already
            errors["expired_in_worker" if is_late else reason] += int(count)
        return _Sample(self._clock(), model.metrics.latencies(), errors)


def _rate(before: _Sample, after: _Sample) -> float:
    seconds = after.at - before.at
    return (sum(after.counts) - sum(before.counts)) / seconds if seconds > 0 else 0.0


def quantile(counts: Sequence[int], share: float) -> float:
    """Return the seconds below which this share of requests lies, interpolated in a bucket.

    The counts are those between the bounds `SECONDS`, and above them; not all are 0. This is the
    rule of Prometheus' ``histogram_quantile``.
    """
    rank = share * sum(counts)
    for index, reached in enumerate(accumulate(counts)):
        if reached >= rank and counts[index]:
            break
    if index == len(SECONDS):
        return SECONDS[-1]
    low = SECONDS[index - 1] if index else 0.0
    return low + (SECONDS[index] - low) * (rank - reached + counts[index]) / counts[index]
