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

    def is_usable(self) -> bool:
        """Whether it counts memory, and processes may be put into it."""
        with contextlib.suppress(OSError), self.starting():
            return self._limit.exists()  # else the controller is not handed down
        return False

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


class NoGroup:
    """Where none can be made: processes start in ours, and a test that needs a limit is skipped."""

    used = 0

    def limit(self, size: int) -> None:
        """Skip the test."""
        pytest.skip(f"no control group for memory can be made here, of {size} bytes")

    def starting(self) -> contextlib.AbstractContextManager[None]:
        """Change nothing."""
        return contextlib.nullcontext()

    def remove(self) -> None:
        """Do nothing."""


@contextlib.contextmanager
def memory_group() -> Iterator[MemoryGroup | NoGroup]:
    """Make a control group for a block."""
    group = next(_groups(), NoGroup())
    try:
        yield group
    finally:
        group.remove()


def _groups() -> Iterator[MemoryGroup]:
    """Make the one that this machine lets us make."""
    name = f"marserve-{uuid.uuid4().hex}"
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        with contextlib.suppress(OSError):
            if controllers == "memory":
                folder = _ROOT / "memory" / inner / name
                group = MemoryGroup(folder, "memory.limit_in_bytes", "memory.usage_in_bytes")
            elif not controllers:
                group = MemoryGroup(_ROOT / inner / name, "memory.max", "memory.current")
            else:
                continue
            if group.is_usable():
                yield group
            group.remove()
