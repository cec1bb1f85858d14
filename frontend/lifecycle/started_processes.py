"""Finds and kills the processes that a server, or one of its workers, has started.

They inherit a *mark*, an entry ``MARSERVE_...=value`` of the environment, which /proc shows
whatever session and parent a process has by then. All descendants of a marked process belong to it.

What escapes: a process that was started with another environment, or has overwritten its own
(``setproctitle``), and had lost its parent before the search.
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

import psutil

#: Its id and its start time, in clock ticks: another process may get the id.
Process: TypeAlias = tuple[int, int]

_PREFIX = b"MARSERVE_"
_KILL_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
_MAX_BYTES = 1 << 21  # what Linux gives arguments and environment by default


class StartedProcesses:
    """The marked processes of this user. The methods block; concurrent searches share a scan."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scanned_at = -1.0
        self._scan: _Scan

    def find(self, mark: str) -> set[Process]:
        """Return the living processes with a mark, and all below those."""
        asked_at = time.monotonic()
        with self._lock:
            if self._scanned_at <= asked_at:
                self._scanned_at = time.monotonic()
                self._scan = _Scan()
            return self._scan.find(mark.encode())

    def kill(self, mark: str, known: Iterable[Process] = ()) -> int:
        """Kill what `find` returns and the ``known``, within 5 s; returns how many there were."""
        deadline = time.monotonic() + _KILL_SECONDS
        killed: set[Process] = set()
        while found := self.find(mark) | set(filter(_lives, {*known, *killed})):
            for each in found:
                with contextlib.suppress(psutil.Error):
                    process = psutil.Process(each[0])
                    if _lives(each):
                        process.kill()
            killed |= found
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE_SECONDS)
        return len(killed)


class _Scan:
    """All processes of a moment, which takes some 30 us for each."""

    def __init__(self) -> None:
        self._marks = {pid: _marks(pid) for pid in psutil.pids()}

    @cached_property
    def _parents(self) -> Mapping[Process, int]:
        parents = {}
        for pid in self._marks:
            with contextlib.suppress(OSError):
                _, parent, start = _status(pid)
                parents[pid, start] = parent
        return parents

    def find(self, mark: bytes) -> set[Process]:
        found = {pid for pid, marks in self._marks.items() if mark in marks}
        if not found:
            return set()
        parents = self._parents
        # Read again: another process may have got the id before its start time was read.
        new = {pid for pid in found if mark in _marks(pid)}
        found = set()
        while new:
            found |= new
            new = {pid for (pid, _), parent in parents.items() if parent in new} - found
        return {each for each in parents if each[0] in found and each[0] != os.getpid()}


def _marks(pid: int) -> set[bytes]:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        data = _read(f"/proc/{pid}/environ")
        if _PREFIX in data and Path(f"/proc/{pid}").stat().st_uid == os.geteuid():
            return {entry for entry in data.split(b"\0") if entry.startswith(_PREFIX)}
    return set()


def _status(pid: int) -> tuple[bytes, int, int]:
    """Return the state, the parent and the start time of a process; raises OSError."""
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split(None, 20)
    return fields[0], int(fields[1]), int(fields[19])


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _MAX_BYTES)
    finally:
        os.close(descriptor)


def _lives(process: Process) -> bool:
    with contextlib.suppress(OSError):
        state, _, start = _status(process[0])
        return start == process[1] and state not in b"ZX"
    return False
