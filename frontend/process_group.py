"""Sends signals to processes and their groups, never to others that reuse their ids."""

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

# Kernels before 5.3, and sandboxes without the call.
_NO_PIDFDS = (errno.ENOSYS, errno.EPERM)
_POLL_SECONDS = 0.05


class ProcessHandle:
    """Signals a process, and never another one that reuses its id.

    Without pidfds, the process counts as alive until `close`.

    Raises:
        OSError: No descriptor is left, or it is the id of a thread.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.pidfd = -1
        self.is_reaped = False
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self.is_reaped = True
        except OSError as error:
            if error.errno not in _NO_PIDFDS:
                raise

    def send(self, number: int) -> bool:
        """Signal the process; return False if it is reaped."""
        if self.is_reaped:
            return False
        try:
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def has_ended_within(self, seconds: float) -> bool:
        """Wait for the end of the process; a zombie has ended. Blocks."""
        deadline = time.monotonic() + seconds
        while not self._has_ended(min(_POLL_SECONDS, seconds)):
            if time.monotonic() > deadline:
                return False
        return True

    def _has_ended(self, seconds: float) -> bool:
        if self.is_reaped:
            return True
        if self.pidfd >= 0:
            return bool(select.select([self.pidfd], [], [], seconds)[0])
        time.sleep(seconds)
        with contextlib.suppress(OSError, IndexError):
            return _status_of(self.pid)[0] in b"ZX"
        return not _exists(self.pid)

    def close(self) -> None:
        """Send no further signals. Safe to call twice."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1
        self.is_reaped = True


class ProcessGroup:
    """The group that a process leads, or will lead shortly.

    The kernel reuses a process id when the process is reaped and no group has the id. A worker
    whose parent, the fork server, has died is reaped by another process. So a signal is sent only
    while the leader is not reaped; or if no process has the id, because then only the remaining
    processes of the group have it.
    """

    def __init__(self, leader: int) -> None:
        self._leader = ProcessHandle(leader)
        self._is_closed = False

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the group, or to the leader if the group does not exist yet."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError):
            if not self._leader.send(0) and _exists(self._leader.pid):
                return  # another process has the id
            try:
                os.killpg(self._leader.pid, number)
            except ProcessLookupError:
                self._leader.send(number)

    def close(self) -> None:
        """Send no further signals. Safe to call twice."""
        self._leader.close()
        self._is_closed = True


def parent_of(pid: int) -> int:
    """Return the id of the parent of a process; raises OSError or IndexError if it is unknown."""
    return int(_status_of(pid)[1])


def _status_of(pid: int) -> list[bytes]:
    """Return the fields of proc_pid_stat(5) behind the name: the state, the parent and so on."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def ancestors(pid: int) -> Iterator[int]:
    """Yield the ids of the parent of a process, of its parent and so on, as far as known."""
    with contextlib.suppress(OSError, IndexError):  # ended, hidden or blank
        while pid := parent_of(pid):
            yield pid


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
