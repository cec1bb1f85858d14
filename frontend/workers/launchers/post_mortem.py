"""Finds out how a process ended: its status, its Python stacks, whether memory ran out.

The kernel ends a process for lack of memory by SIGKILL, as a user can. Only its counters show that
it was the kernel. They count for a whole control group (or for the machine, without one), so an
increase is attributed to the first worker that was killed since.
"""

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

from marserve.backend.control_groups import PROC, nested_groups

_MAX_STACK_BYTES = 16 * 1024
_MAX_STACK_LINES = 50


def exit_phrase(status: int | None) -> str:
    """Return how a process with this exit status ended, to follow "Its process"."""
    if status is None:
        return "ended with an unknown exit status"
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
        """The path by which any process of this user can open it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    @property
    def size(self) -> int:
        """Bytes written so far; only while it is open."""
        return os.fstat(self._descriptor).st_size

    def lines(self) -> list[str]:
        """Return the last lines: a crash is written last, and the main thread last in it."""
        if self._lines is not None:
            return self._lines
        start = max(0, self.size - _MAX_STACK_BYTES)
        text = os.pread(self._descriptor, _MAX_STACK_BYTES, start).decode(errors="replace")
        return text.splitlines()[-_MAX_STACK_LINES:]

    def close(self) -> None:
        """Close the file; `lines` stays available. Safe to call twice."""
        if self._lines is None:
            self._lines = self.lines()
            os.close(self._descriptor)


class OomKills:
    """The kernel's counter of processes that it killed for lack of memory."""

    def __init__(self, read: Callable[[], int] | None = None) -> None:
        path = _counter()
        self._read = read or (lambda: _number(_value(path, "oom_kill"), 10))
        self._attributed = self._read()

    def was_another(self) -> bool:
        """Return whether there is a kill that was not attributed to a worker yet; attribute it."""
        if self._read() <= self._attributed:
            return False
        self._attributed += 1
        return True


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal, so that the signal does not end it."""
    caught = _number(_value(PROC / str(pid) / "status", "SigCgt:"), 16)
    return bool(caught >> (number - 1) & 1)


def _value(path: Path, label: str) -> str:
    """Return the word after a label in one of the kernel's files, "0" if it is missing."""
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            match line.split():
                case [first, value, *_] if first == label:
                    return value
    return "0"


def _number(text: str, base: int) -> int:
    try:
        return int(text, base)
    except ValueError:
        return 0


def _counter() -> Path:
    """Return the file with the counter: of the innermost control group, or of the machine."""
    files = (
        group / ("memory.events" if version == 2 else "memory.oom_control")
        for version, group in nested_groups("memory")
    )
    return next((file for file in files if file.is_file()), PROC / "vmstat")
