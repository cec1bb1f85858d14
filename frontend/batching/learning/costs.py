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
    def vary_widely(self) -> bool:
        """Whether batches of one size differ so much that few take about the mean."""

    def mean(self, size: float) -> float:
        """Return the mean seconds of a batch of this size."""

    def bound(self, size: float) -> float:
        """Return a high estimate of the seconds of such a batch; it does not fall with the size."""

    def until_answered(self, size: float) -> float:
        """Return the mean seconds until the answers of such a batch are sent."""
