"""The batching settings of one model version: checks, derived values, and the policy they choose.

The names are TorchServe's, BentoML's (``max_batch_size``, ``max_latency_ms``), OpenVINO's
(``num_requests``) and Neuron's (``dynamic_batch_size``).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from marserve.frontend.batching.adaptive import Adaptive
from marserve.frontend.batching.compiled_sizes import up_to
from marserve.frontend.batching.learning.costs import Costs
from marserve.frontend.batching.learning.latency_model import LatencyModel
from marserve.frontend.batching.policies import BatchPolicy, FixedOrSingle, FixedWindow, Greedy
from marserve.frontend.configuration.model_schema import (
    ADAPTIVE,
    BATCH_POLICIES,
    FIXED_OR_SINGLE,
    GREEDY,
    BatchingValues,
)

#: The largest batch that is tried when the size is chosen automatically.
MAX_AUTOMATIC_SIZE = 128


class Batching(BatchingValues):
    """The batching settings, and values that are derived from them."""

    @property
    def max_size(self) -> int:
        """The largest batch that the settings allow."""
        return min(self.size, self.num_requests or self.size, *self.compiled_sizes[-1:])

    @property
    def keeps_deadlines(self) -> bool:
        """Whether the policy refuses jobs that cannot be answered in time."""
        return self.policy == ADAPTIVE

    @property
    def explores(self) -> bool:
        """Whether batches of other sizes are tried under backlog, to learn their costs."""
        is_learnt = self.is_automatic or self.policy == ADAPTIVE
        return is_learnt and self.policy != FIXED_OR_SINGLE and self.max_size > 1

    @property
    def sizes_to_try(self) -> list[int]:
        """The sizes, rising, whose costs are learnt separately."""
        maximum, compiled = self.max_size, self.compiled_sizes
        if compiled:
            return list(up_to(compiled, maximum))
        powers = [1 << exponent for exponent in range(maximum.bit_length())]
        between = [3 * power // 2 for power in powers[1:]]  # 3, 6, 12, …
        return sorted({*(size for size in (*powers, *between) if size <= maximum), maximum})

    def run_as(self, size: int) -> int:
        """Return the number of rows that a batch of this size runs as: the next compiled size."""
        if not self.compiled_sizes:
            return size
        return next((compiled for compiled in self.compiled_sizes if compiled >= size), size)

    @property
    def goal(self) -> float:
        """The latency goal in seconds; infinite for none."""
        return self.max_latency or math.inf

    @property
    def goal_bounds_queue(self) -> bool:
        """Whether the latency goal alone bounds the queue: no size is chosen for it."""
        return bool(self.max_latency) and not self.is_queue_bounded

    def check(self) -> "Batching":
        """Return these settings; raises ValueError if they contradict each other."""
        if self.policy not in BATCH_POLICIES:
            known = ", ".join(BATCH_POLICIES)
            raise ValueError(f"batch_policy={self.policy}: it is one of {known}.")
        if self.size < 1:
            raise ValueError(f"batch_size={self.size}: a batch holds at least 1 request.")
        if self.max_latency and self.policy != ADAPTIVE:
            raise ValueError(
                f"max_latency_ms={self.max_latency * 1000:g}: only batch_policy={ADAPTIVE} has a "
                f"latency goal, not {self.policy}."
            )
        if self.compiled_sizes:
            self._check_compiled_sizes(self.compiled_sizes)
        return self

    def _check_compiled_sizes(self, sizes: Sequence[int]) -> None:
        formatted = f"compiled_batch_sizes={','.join(map(str, sizes))}"
        if sizes[0] < 1 or any(a >= b for a, b in pairwise(sizes)):
            raise ValueError(f"{formatted}: each is at least 1 and larger than the one before.")
        if self.size > sizes[-1] and not self.is_automatic:
            raise ValueError(
                f"batch_size={self.size}: the largest of {formatted} is all that the model can run."
            )

    def checked_against(self, costs: LatencyModel) -> "Batching":
        """Return these settings; raises ValueError if one request is known to miss the goal."""
        rows = self.run_as(1)
        if self.max_latency and costs.batches_of(rows) and costs.mean(rows) > self.max_latency:
            raise ValueError(
                f"max_latency_ms={self.max_latency * 1000:g}: a single request takes "
                f"{costs.mean(rows) * 1000:.3g} ms; the goal must not be below that."
            )
        return self

    def make_policy(self, costs: Costs) -> BatchPolicy:
        """Make the policy that these settings choose, for batches of up to `max_size`."""
        size = self.max_size
        if self.policy == GREEDY:
            return Greedy(size)
        if self.policy == ADAPTIVE:
            return Adaptive(size, costs, self.goal, self.delay, self.num_requests)
        if self.policy == FIXED_OR_SINGLE:  # a list that closes the window would run row by row
            return FixedOrSingle(size, self.delay, self.num_requests, costs)
        return FixedWindow(size, self.delay, self.num_requests, costs, self.splits_lists)


def with_implied(changes: Mapping[str, object]) -> dict[str, object]:
    """Add the changes that other changes imply, by field name.

    A latency goal makes the policy adaptive if none is named; any other policy removes the goal.
    None as a value implies nothing.
    """
    implied = dict(changes)
    if implied.get("max_latency") and "policy" not in implied:
        implied["policy"] = ADAPTIVE
    if (implied.get("policy") or ADAPTIVE) != ADAPTIVE:
        implied.setdefault("max_latency", 0.0)
    return implied
