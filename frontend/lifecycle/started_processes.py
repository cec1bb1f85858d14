"""Finds and kills the processes that a server, or one of its workers, has started.

They inherit a *mark*, an entry ``MARSERVE_...=value`` of the environment, which /proc shows
independently of their session and parent. All descendants of a marked process belong to it.

A process is not found if it was started with another environment, or has overwritten its own
(``setproctitle``), and its parent ended before the search.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil

from marserve.frontend.process_group import parent_of

logger = logging.getLogger(__name__)

_PREFIX = b"MARSERVE_"
_KILL_SECONDS = 5.0
_PAUSE_SECONDS = 0.02
# Not every OSError: a search without a free descriptor finds nothing.
# LookupError: its files in /proc are blank.
_ENDED = (ProcessLookupError, FileNotFoundError, PermissionError, LookupError, psutil.Error)

#: A process, the id of its parent, and its environment if that contains a mark.
_Seen: TypeAlias = tuple[psutil.Process, int, Sequence[bytes]]


class StartedProcesses:
    """The marked processes of this machine. The methods block; concurrent searches share a scan."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._scanned_at = -1.0
        self._scan: Sequence[_Seen] = ()

    def find(self, mark: str, roots: Iterable[psutil.Process] = ()) -> set[psutil.Process]:
        """Return the living among the processes with a mark, ``roots``, and their descendants."""
        asked_at = time.monotonic()
        with self._lock:
            if self._scanned_at <= asked_at:
                self._scanned_at, self._scan = time.monotonic(), _scan()
            scan = self._scan
        found: set[psutil.Process] = set()
        marked = (process for process, _, environment in scan if mark.encode() in environment)
        new = {*roots, *marked}
        while new := set(filter(_is_ours, new - found)):
            found |= new
            parents = {process.pid for process in new}
            new = {process for process, parent, _ in scan if parent in parents}
        return found

    def kill(self, mark: str, known: Iterable[psutil.Process] = ()) -> int:
        """Kill what `find` returns and the ``known``, within 5 s; return their number."""
        deadline = time.monotonic() + _KILL_SECONDS
        killed: set[psutil.Process] = set()
        while found := self.find(mark, {*known, *killed}):
            for process in found:
                with contextlib.suppress(*_ENDED):
                    process.kill()  # psutil checks that the id was not reused
            killed |= found
            if time.monotonic() > deadline:
                pids = sorted(process.pid for process in found)
                logger.warning("Processes have not ended by SIGKILL within 5 s: %s", pids)
                break
            time.sleep(_PAUSE_SECONDS)
        return len(killed)


def _scan() -> Sequence[_Seen]:
    """Return all processes; takes about 0.1 ms for each."""
    scan = []
    for pid in psutil.pids():
        with contextlib.suppress(*_ENDED):
            process = psutil.Process(pid)  # first: it notes the start time
            parent = parent_of(pid)
            environment = b""
            with contextlib.suppress(PermissionError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
            marks = environment.split(b"\0") if _PREFIX in environment else ()
            scan.append((process, parent, marks))
    return scan


def _is_ours(process: psutil.Process) -> bool:
    """Whether a process lives, is not this one, and is of our user; root may have changed users."""
    with contextlib.suppress(*_ENDED):
        lives = process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        is_of_user = os.geteuid() in (0, process.uids().real)
        return lives and is_of_user and process.pid != os.getpid()
    return False
