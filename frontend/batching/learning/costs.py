"""The costs of batches, as policies see them."""

from typing import Protocol

#: The least seconds of a batch; without it a coarse clock could make a cost of 0.
MIN_SECONDS = 1e-6


class Costs(Protocol):
    """Predicts the cost of batches."""

    @property
    def is_known(self) -> bool:
        """Whether any cost was learnt."""

    @property
    def deviation(self) -> float:
        """The mean deviation of batches from their mean, as a share of it."""

    def mean(self, size: float) -> float:
        """Return the mean seconds of a batch of this size."""

    def bound(self, size: float) -> float:
        """Return a high estimate of the seconds of such a batch; it does not fall with the size."""

    def until_answered(self, size: float) -> float:
        """Return the mean seconds until the answers of such a batch are sent."""
