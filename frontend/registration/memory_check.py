"""Refuses to load a model for which there is no memory, before the kernel has to end a process.

What a model takes is known only when it has been loaded; that it takes no less than its weights is
known before. So its files must fit into what is left, less what is kept free for the models that
serve already (``min_free_memory_percent``). With GPUs the weights only pass through memory, so they
count once, else once for each worker. What is about to be loaded counts as used already.

Who is refused with 507 may unregister models and ask again, as SageMaker's multi-model endpoints
do. Where no other model is served nobody is refused, for not all files need be weights; nor is a
model that the server loads when it starts.
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
    """Knows what is left for models.

    Attributes:
        kept_percent: Of the usable memory, that a load must leave; 0: nobody is refused.
        usable: Asked for the bytes that there are.
        free: Asked for the bytes that are left of them.
    """

    kept_percent: int
    usable: Callable[[], int] = usable_memory
    free: Callable[[], int] = free_memory
    _claimed: int = field(default=0, init=False)

    @contextlib.asynccontextmanager
    async def claim(self, name: str, directory: Path, copies: int) -> AsyncIterator[None]:
        """Count the files of a model as used memory, so many times, while a block loads it.

        Raises:
            NotEnoughMemory: There is not as much left.
        """
        needed = 0
        if self.kept_percent and copies:
            needed = copies * await in_abandonable_thread(bytes_in, directory)
            kept = int(self.usable() * self.kept_percent / 100)
            left = self.free() - kept - self._claimed
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
    """The size of all files in a directory; of one that has several names, once.

    Directories that are copies of Hugging Face's cache have links to each of their files.
    """
    sizes = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # gone, or a link to nowhere
                status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - there may be many
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())


def _mebibytes(count: int) -> str:
    return f"{count / _MEBIBYTE:.0f} MiB"
