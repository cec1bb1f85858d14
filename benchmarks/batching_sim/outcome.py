"""What became of the requests of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from clients import Request
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outcome:
    """What became of the requests of one run, in the order of their arrival.

    Attributes:
        arrived: When each came, seconds.
        latency: Seconds until it was answered; NaN for those that were refused.
        good: Whether it was answered in time.
        refused: Whether it was turned away at the door.
        shed: Whether it was turned away later, from the queue.
        sizes: Of the batches.
        busy: Seconds that workers worked.
    """

    arrived: NDArray[np.float64]
    latency: NDArray[np.float64]
    good: NDArray[np.bool_]
    refused: NDArray[np.bool_]
    shed: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    busy: float

    @classmethod
    def of(cls, requests: Sequence[Request], sizes: Sequence[int], busy: float) -> "Outcome":
        """Collect what the requests know."""
        answered = np.array([one.answered for one in requests])
        arrived = np.array([one.arrived for one in requests])
        due = np.array([one.deadline for one in requests])
        refused = np.array([one.error == "refused" for one in requests])
        return cls(
            arrived,
            answered - arrived,
            answered <= due + 1e-9,
            refused,
            np.isnan(answered) & ~refused,
            np.array(sizes),
            busy,
        )

    def after(self, count: int) -> "Outcome":
        """The same without the first requests; batches are those of all."""
        if not count:
            return self
        each = (self.arrived, self.latency, self.good, self.refused, self.shed)
        return Outcome(*(values[count:] for values in each), self.sizes, self.busy)

    @property
    def goodput(self) -> float:
        """Share of all requests that were answered in time; not a number if there were none."""
        return float(self.good.mean()) if len(self.good) else math.nan

    @property
    def late(self) -> float:
        """Share of the answers that came too late; a request that was shed has no answer."""
        answers = np.isfinite(self.latency)
        return float((answers & ~self.good).sum() / max(1, answers.sum()))

    @property
    def turned_away(self) -> float:
        """Share of all requests that were refused, at the door or later."""
        return float((self.refused | self.shed).mean())

    @property
    def mean_latency(self) -> float:
        """Seconds, of all answers."""
        return float(np.nanmean(self.latency)) if np.isfinite(self.latency).any() else math.nan

    @property
    def latency_p99(self) -> float:
        """Seconds, the 99th percentile of all answers."""
        return self.latency_at(99)

    def latency_at(self, percentile: float) -> float:
        """Seconds, a percentile of all answers."""
        answers = self.latency[np.isfinite(self.latency)]
        return float(np.percentile(answers, percentile)) if len(answers) else math.nan

    def good_latency(self, percentile: float | None = None) -> float:
        """Seconds, of the answers in time: the mean, or a percentile."""
        good = self.latency[self.good]
        if not len(good):
            return math.nan
        return float(good.mean() if percentile is None else np.percentile(good, percentile))

    @property
    def batch_size(self) -> float:
        """Mean requests in a batch."""
        return float(self.sizes.mean()) if len(self.sizes) else math.nan
