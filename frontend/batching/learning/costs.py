"""The costs of batches, as policies see them."""

from typing import Protocol

#: The least seconds of a batch; without it a coarse clock could make a cost of 0.
MIN_SECONDS = 1e-6


class Costs(Protocol):
    """Predicts the cost of batches."""

    @property
    def is_known(self) -> bool:
        """Whether any cost was learnt."""

    def mean(self, size: float) -> float:
        """Return the mean seconds of a batch of this size."""

    def bound(self, size: float) -> float:
        """Return a high estimate of the seconds of such a batch; it does not fall with the size."""

    def chance(self, size: float, seconds: float) -> float:
        """Return the chance that such a batch ends within these seconds."""
