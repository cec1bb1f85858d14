"""Control groups with little memory, for tests of servers that run out of memory."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import wait_for

_ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group, of version 1 or 2; a new one has no limit."""

    def __init__(self, folder: Path, limit: str, used: str) -> None:
        self.folder = folder
        self._limit = folder / limit
        self._used = folder / used
        folder.mkdir()

    def is_usable(self) -> bool:
        """Whether it counts memory, and processes may be put into it."""
        with contextlib.suppress(OSError), self.starting():
            return self._limit.exists()  # or the parent does not delegate the controller
        return False

    @property
    def used(self) -> int:
        """Bytes that its processes use, file pages included."""
        return int(self._used.read_text())

    def limit(self, size: int) -> None:
        """Limit the memory of its processes, in bytes, and forbid swap."""
        self._limit.write_text(str(size))
        for file, text in (("memory.swap.max", "0"), ("memory.swappiness", "0")):
            if (self.folder / file).exists():
                (self.folder / file).write_text(text)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Put processes that the block starts into the group, with their children."""
        mine = str(os.getpid())
        (self.folder / "cgroup.procs").write_text(mine)
        try:
            yield
        finally:
            (self.folder.parent / "cgroup.procs").write_text(mine)

    def remove(self) -> None:
        """Wait for the end of its last process, and remove the group."""

        def is_removed() -> bool:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            return not self.folder.exists()

        wait_for(is_removed, what=f"processes are left in {self.folder}")


class NoGroup:
    """The replacement where no group can be made; a test that sets a limit is skipped."""

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
    """Make the group that this machine permits."""
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
