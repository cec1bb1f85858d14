"""Control groups with little memory, for servers that are to run out of it."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import wait_for

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group, of version 1 or 2, without a limit of its own at first."""

    def __init__(self, folder: Path, limit: str, used: str) -> None:
        self.folder = folder
        self._limit = folder / limit
        self._used = folder / used
        folder.mkdir()

    @property
    def has_limit(self) -> bool:
        """Whether it counts memory."""
        return self._limit.exists()

    @property
    def used(self) -> int:
        """Bytes that its processes use, pages of files included."""
        return int(self._used.read_text())

    def limit(self, size: int) -> None:
        """Let its processes use so many bytes and no more, nor any swap."""
        self._limit.write_text(str(size))
        for file, text in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            if (self.folder / file).exists():
                (self.folder / file).write_text(text)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Processes that are started within the block are in it, and so are their children."""
        mine = str(os.getpid())
        (self.folder / "cgroup.procs").write_text(mine)
        try:
            yield
        finally:
            (self.folder.parent / "cgroup.procs").write_text(mine)

    def remove(self) -> None:
        """Remove it, when its last process is gone."""

        def is_removed() -> bool:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            return not self.folder.exists()

        wait_for(is_removed, what=f"processes are left in {self.folder}")


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make one for a block; skips the test where that may not be."""
    name = f"marserve-{uuid.uuid4().hex}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        with contextlib.suppress(OSError):
            if controllers == "memory":
                folder = _ROOT / "memory" / inner / name
                group = MemoryGroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
            elif not controllers and (_ROOT / inner / "memory.max").exists():
                group = MemoryGroup(_ROOT / inner / name, "memory.max", "memory.current")
            else:
                continue
            if not group.has_limit:  # the controller is not handed down
                group.remove()
                continue
            with group.starting():
                pass
            break
    else:
        pytest.skip("no control group for memory can be made here")
    try:
        yield group
    finally:
        group.remove()
