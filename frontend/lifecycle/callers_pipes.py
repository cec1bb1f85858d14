"""Standard output and standard error of a detached server where they are pipes.

A reader, as in ``torchserve --start | tail -1``, waits until no process has the pipe open. So the
server's children do not inherit it, and the server leaves it when it listens; from then on its log
files alone have what it logs. Two kinds of pipes stay open, as with TorchServe: one that an
ancestor of the server reads, and one of a container's first process, which is the container's log.
"""

import contextlib
import os
import re
import stat
import sys
from pathlib import Path

from marserve.frontend.process_group import ancestors


class CallersPipes:
    """The pipes, which `take` moves to descriptors that children do not inherit."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []

    def take(self) -> None:
        """Move the pipes; children get /dev/null instead."""
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            if not _is_callers(descriptor):
                continue
            ours = os.dup(descriptor)
            _discard(descriptor)
            stream = open(ours, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115, PTH123 - as long as the process, a descriptor
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
            self._descriptors.append(ours)

    def leave(self) -> None:
        """Close the pipes; later output is discarded."""
        for descriptor in self._descriptors:
            _discard(descriptor)


def _is_callers(descriptor: int) -> bool:
    try:
        output = os.fstat(descriptor)
    except OSError:  # it is closed
        return False
    if not stat.S_ISFIFO(output.st_mode):
        return False
    for path in ("/proc/1/fd/1", "/proc/1/fd/2"):
        with contextlib.suppress(OSError):
            if os.path.samestat(output, os.stat(path)):  # noqa: PTH116 - for samestat
                return False
    return not any(_reads(pid, output) for pid in ancestors(os.getpid()))


def _reads(pid: int, pipe: os.stat_result) -> bool:
    try:
        descriptors = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - names
    except OSError:  # of another user, or ended
        return False
    return any(_is_read_end(pid, descriptor, pipe) for descriptor in descriptors)


def _is_read_end(pid: int, descriptor: str, pipe: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # closed meanwhile
        if os.path.samestat(pipe, Path(f"/proc/{pid}/fd/{descriptor}").stat()):
            information = Path(f"/proc/{pid}/fdinfo/{descriptor}").read_text()
            flags = re.search(r"^flags:\s*(\d+)$", information, re.MULTILINE)
            return flags is not None and int(flags[1], 8) & os.O_ACCMODE != os.O_WRONLY
    return False


def _discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor, inheritable=descriptor <= 2)
    os.close(null)
