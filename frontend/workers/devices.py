"""Which GPU a worker gets.

A plain worker gets the number of its GPU and sees all of them (no CUDA_VISIBLE_DEVICES), as
handlers written for TorchServe expect. A parallel worker gets a block of GPUs, and sees no others.
The GPUs with the fewest workers are next; TorchServe's counter never looked back, so that after
scaling some were crowded and others empty.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class DeviceAllocator:
    """Deals out GPUs, each time those with the fewest workers; of 0, every worker has the CPU."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._load: Counter[int] = Counter()

    def capacity(self, size: int, allowed: Sequence[int] | None = None) -> int:
        """How many workers of a model there can be that take ``size`` GPUs each."""
        return len(self._choice(allowed)) // size

    def acquire(self, size: int = 1, allowed: Sequence[int] | None = None) -> tuple[int, ...]:
        """Take GPUs for a worker; none when it has to run on the CPU.

        More than one are neighbours, and the first of them a multiple of ``size`` among those
        allowed, which are all by default.
        """
        choice = self._choice(allowed)
        blocks = [tuple(choice[at : at + size]) for at in range(0, len(choice) - size + 1, size)]
        if not blocks:
            return ()
        block = min(blocks, key=lambda gpus: sum(self._load[gpu] for gpu in gpus))
        self._load.update(block)
        return block

    def release(self, gpus: Iterable[int]) -> None:
        """Give GPUs back."""
        self._load.subtract(gpus)

    def _choice(self, allowed: Sequence[int] | None) -> Sequence[int]:
        if not self.count:
            return ()
        return range(self.count) if allowed is None else allowed


def visible_names(gpus: Sequence[int], environment: Mapping[str, str] = os.environ) -> str:
    """What CUDA_VISIBLE_DEVICES has to say so that a process sees these GPUs and no others.

    They are numbered as this process sees them, which may itself see a part only.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[gpu] for gpu in gpus)
