"""The share of failing requests, and the batch size that is cheapest with it.

A failed batch is run again in parts (`splitting`), which costs more the larger the batch and the
more of its requests fail. So sizes are chosen by the expected cost of a request, splitting
included. This bounds what an attacker gains: at worst, requests are served one by one.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from marserve.frontend.batching.learning.costs import Costs

# The weight of the newest request in the share: a thousandth is left of it after 440 good ones.
_STEP = 1 / 64
_NEGLIGIBLE = 0.001
# A larger size is preferred to one that costs up to this much less.
_TOLERANCE = 1.05
# The weight of the newest run in the cost of failed runs.
_COST_STEP = 1 / 16
# After this many runs without a success, all requests fail, for another reason than the size.
_RUNS_IN_VAIN = 64


class FailureRate:
    """Learns the share of requests that fail, of those that share batches."""

    def __init__(self) -> None:
        self.share = 0.0  # of about the last 64 requests; 0 if it is negligible
        self.runs_in_vain = 0  # that have failed since the last one that succeeded
        self.cost = 1.0  # of a failed run, as a share of one that succeeds

    @property
    def is_quiet(self) -> bool:
        """Whether no request failed lately."""
        return not self.share and not self.runs_in_vain

    @property
    def fails_for_all(self) -> bool:
        """Whether the model fails for all requests, and not for some of them."""
        return self.runs_in_vain >= _RUNS_IN_VAIN

    def succeeded(self, requests: int) -> None:
        """Note a run that succeeded."""
        self.runs_in_vain = 0
        self.share *= (1.0 - _STEP) ** requests
        if self.share < _NEGLIGIBLE:
            self.share = 0.0

    def run_failed(self, cost: float = 1.0) -> None:
        """Note a run that failed, and its cost as a share of one that succeeds."""
        self.runs_in_vain += 1
        self.cost += _COST_STEP * (min(cost, 1.0) - self.cost)

    def request_failed(self) -> None:
        """Note that a request is the cause of a failure."""
        self.share += _STEP * (1.0 - self.share)


class Failures(NamedTuple):
    """How requests fail (`FailureRate.share` and ``cost``, `Hints.hinted` and ``checked``)."""

    share: float
    hinted: float = 0.0
    checked: float = 1.0
    cost: float = 1.0


def cheapest_size(sizes: Sequence[int], costs: Costs, failures: Failures) -> int:
    """Return the largest of rising sizes whose cost per request is within 5 % of the least."""
    per_request = {size: expected_seconds(size, costs, failures) / size for size in sizes}
    least = min(per_request.values())
    return max(size for size in sizes if per_request[size] <= _TOLERANCE * least)


def expected_seconds(size: int, costs: Costs, failures: Failures) -> float:
    """Return the mean seconds until all requests of a batch are answered, splitting included."""
    share, hinted, checked, failed = failures
    by_halves = _by_halves(size, 1.0 - share, costs, failed, {})
    if not hinted or size == 1:
        return by_halves
    # Each bad request has failed a run of most of the others, and perhaps a run alone.
    found = size * share * failed * (costs.mean(size - 1) + checked * costs.mean(1))
    return (1.0 - hinted) * by_halves + hinted * (costs.mean(size) + found)


def _by_halves(
    size: int, good: float, costs: Costs, failed: float, known: dict[int, float]
) -> float:
    """Return the mean seconds of a batch, and of its halves if it fails, and so on.

    When one half of a failed batch has succeeded, the other is not run as a whole: it would fail.
    """
    mean, all_good = costs.mean, good**size
    itself = mean(size) * (all_good + (1.0 - all_good) * failed)
    if size == 1:
        return itself
    if size not in known:
        first = size // 2
        second = size - first
        halves = sum(_by_halves(half, good, costs, failed, known) for half in (first, second))
        not_run = all_good * (mean(first) + mean(second))
        if second > 1:
            not_run += good**first * (1.0 - good**second) * mean(second) * failed
        known[size] = itself + halves - not_run
    return known[size]


def candidates(largest: int, compiled: Iterable[int] = ()) -> list[int]:
    """Return the rising sizes to choose from: compiled ones, or powers of two and the largest."""
    allowed = [size for size in compiled if size <= largest]
    return allowed or [*(1 << power for power in range((largest - 1).bit_length())), largest]
