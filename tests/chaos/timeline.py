"""What went wrong when: the faults that were made, against which outcomes are judged."""

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

#: Seconds for which the effects of a fault may be felt after it has ended: a dead worker is
#: noticed, a refused connection is opened again.
AFTERMATH = 1.0


@dataclass
class Fault:
    """Something that goes wrong for a while, for one model or for all (``model`` is empty)."""

    kind: str
    model: str
    began: float
    ended: float = math.inf

    def touches(self, since: float, until: float) -> bool:
        """Whether it can be felt between two moments."""
        return self.began <= until and since <= self.ended + AFTERMATH


class Timeline:
    """All ``faults`` of a run; moments are those of `time.monotonic`."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    @contextlib.contextmanager
    def fault(self, kind: str, model: str = "") -> Iterator[Fault]:
        """A fault that lasts as long as the block."""
        fault = Fault(kind, model, time.monotonic())
        self.faults.append(fault)
        try:
            yield fault
        finally:
            fault.ended = time.monotonic()

    def count(self, kind: str, model: str, since: float, until: float) -> int:
        """How many faults of a kind a request to the model may have felt."""
        return sum(
            fault.kind == kind and fault.model in ("", model) and fault.touches(since, until)
            for fault in self.faults
        )

    def seconds(self, kind: str, since: float, until: float) -> float:
        """How much of the time between two moments faults of a kind took."""
        return sum(
            max(0.0, min(fault.ended, until) - max(fault.began, since))
            for fault in self.faults
            if fault.kind == kind
        )
