"""Allocates GPUs to workers.

A plain worker gets the number of its GPU and sees all GPUs (no CUDA_VISIBLE_DEVICES), as handlers
written for TorchServe expect. A parallel worker gets a block of GPUs, and sees no others.
TorchServe takes GPUs in turn, so that after scaling some have many workers and others none.
"""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class DeviceAllocator:
    """Allocates the GPUs with the fewest workers; with a count of 0, all workers use the CPU."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._load: Counter[int] = Counter()

    def capacity(self, size: int, allowed: Sequence[int] | None = None) -> int:
        """Return the largest number of workers of a model with ``size`` GPUs each."""
        return len(self._choice(allowed)) // size

    def acquire(self, size: int = 1, allowed: Sequence[int] | None = None) -> tuple[int, ...]:
        """Allocate ``size`` GPUs out of ``allowed`` for a worker; none for the CPU.

        Blocks begin at multiples of ``size`` in ``allowed``, so that they do not overlap in part.
        """
        choice = self._choice(allowed)
        blocks = [tuple(choice[at : at + size]) for at in range(0, len(choice) - size + 1, size)]
        if not blocks:
            return ()
        block = min(blocks, key=lambda gpus: sum(self._load[gpu] for gpu in gpus))
        self._load.update(block)
        return block

    def release(self, gpus: Iterable[int]) -> None:
        """Return the GPUs of a worker that has ended."""
        self._load.subtract(gpus)

    def _choice(self, allowed: Sequence[int] | None) -> Sequence[int]:
        if not self.count:
            return ()
        return range(self.count) if allowed is None else allowed


def visible_names(gpus: Sequence[int], environment: Mapping[str, str] = os.environ) -> str:
    """Return the CUDA_VISIBLE_DEVICES with which a process sees only these GPUs.

    ``gpus`` are numbers in this process, which may see only some of the machine's GPUs.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return ",".join(map(str, gpus))
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[gpu] for gpu in gpus)
