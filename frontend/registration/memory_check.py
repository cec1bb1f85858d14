"""The refusal to load a model for which memory is short, before the kernel ends a process.

The files of a model must fit into the free memory minus ``min_free_memory_percent``. On GPUs the
weights only pass through memory and count once, otherwise once per worker. Models that are loading
count as used memory.

The first model, whose files may not all be weights, and the models of the start are not refused.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.configuration.memory import free_memory, usable_memory
from marserve.frontend.errors import NotEnoughMemory

_MEBIBYTE = 1 << 20


@dataclass(eq=False)
class MemoryCheck:
    """Checks the free memory before models load."""

    kept_percent: int  # of the usable memory, that a load must leave; 0: no check
    usable: Callable[[], int] = usable_memory
    free: Callable[[], int | None] = free_memory  # None: unknown, which refuses no model
    _claimed: int = field(default=0, init=False)

    @contextlib.asynccontextmanager
    async def claim(self, name: str, directory: Path, copies: int) -> AsyncIterator[None]:
        """Count ``copies`` of a model's files as used memory while the block loads it.

        Raises:
            NotEnoughMemory: The free memory is smaller.
        """
        needed = 0
        if self.kept_percent and copies:
            needed = copies * await in_abandonable_thread(bytes_in, directory)
            kept = int(self.usable() * self.kept_percent / 100)
            free = self.free()
            left = needed if free is None else free - kept - self._claimed
            if needed > left:
                raise NotEnoughMemory(
                    f"Not enough memory to load model {name}: its files are "
                    f"{_mebibytes(needed)} for {copies} worker(s), and {_mebibytes(max(0, left))} "
                    f"are left beside {_mebibytes(kept)} that are kept free "
                    f"(min_free_memory_percent={self.kept_percent})."
                )
        self._claimed += needed
        try:
            yield
        finally:
            self._claimed -= needed


def bytes_in(directory: Path) -> int:
    """Return the size of all files in a directory; those with several links count once."""
    sizes = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # removed meanwhile, or a dangling link
                status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - there may be many
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _mebibytes(count: int) -> str:
    return f"{count / _MEBIBYTE:.0f} MiB"
