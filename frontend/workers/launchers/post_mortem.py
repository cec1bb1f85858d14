"""What the system tells of a process that ended: how, where Python stood, whether memory ran out.

The kernel ends a process for want of memory by SIGKILL, like anybody else; that it was the kernel,
and why, only its counters tell. They count for a whole control group (where there is none, for the
machine), so one more than was known before is put down to the first worker that was killed.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_MAX_STACK_BYTES = 16 * 1024
_MAX_STACK_LINES = 50


def exit_phrase(status: int | None) -> str:
    """How a process with this exit status ended, as the end of a sentence that begins with it.

    It is not known of a worker that had lost its parent, the fork server.
    """
    if status is None:
        return "ended, and nobody knows how"
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"


class StackFile:
    """A file in memory that a worker's faulthandler writes to (`backend.worker.record_stacks`)."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("stacks")
        self._lines: list[str] | None = None

    @property
    def path(self) -> str:
        """Where any process of this user can open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def size(self) -> int:
        """Bytes written so far; not to be asked of a closed one."""
        return os.fstat(self._descriptor).st_size

    def lines(self) -> list[str]:
        """What was written last, for a crash comes last; so does the main thread in it."""
        if self._lines is not None:
            return self._lines
        begin = max(0, self.size - _MAX_STACK_BYTES)
        text = os.pread(self._descriptor, _MAX_STACK_BYTES, begin).decode(errors="replace")
        return text.splitlines()[-_MAX_STACK_LINES:]

    def close(self) -> None:
        """Close it; what was written is still known. Safe to call twice."""
        if self._lines is None:
            self._lines = self.lines()
            os.close(self._descriptor)


class OomKills:
    """The kernel's count of processes that it ended for want of memory.

    By default that of our control group; where there is none, of the machine.
    """

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        path = _counter()
        self._read = read or (lambda: int(_value(path, "oom_kill")))
        self._known = self._read()

    def was_another(self) -> bool:
        """Whether there was one that has not been put down to a worker yet; now it is."""
        if self._read() <= self._known:
            return False
        self._known += 1
        return True


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, so that it will not die of it."""
    caught = int(_value(_PROC / str(pid) / "status", "SigCgt:"), 16)
    return bool(caught >> (number - 1) & 1)


def _value(path: Path, label: str) -> str:
    """What follows a label in one of the kernel's files, "0" where it is not there."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.split()[:1] == [label]:
                return line.split()[1]
    return "0"


def _counter() -> Path:
    """The file with the count: of control groups version 2 or 1, or of the machine."""
    groups: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in (_PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            groups.update(dict.fromkeys(controllers.split(","), group.lstrip("/")))
    # In a container the group may have the host's name, and be mounted at the top.
    candidates = [
        mount / group / name
        for mount, controller, name in (
            (_CGROUPS, "", "memory.events"),
            (_CGROUPS / "memory", "memory", "memory.oom_control"),
        )
        for group in (groups.get(controller), "")
        if group is not None
    ]
    found = (path for path in candidates if path.is_file())
    return next(found, _PROC / "vmstat")
