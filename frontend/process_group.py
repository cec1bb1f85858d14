"""Sends signals to a process group, and never to another process that reuses its id."""

import contextlib
import errno
import os
import signal

# Kernels before 5.3, and sandboxes without the call.
_NO_PIDFDS = (errno.ENOSYS, errno.EPERM)


class ProcessGroup:
    """The group that a process leads, or will lead shortly; raises OSError without descriptors.

    The kernel reuses a process id when the process is reaped and no group has the id. A worker
    whose parent, the fork server, has died is reaped by another process. So a signal is sent only
    while the leader is not reaped, which its pidfd shows; or if no process has the id, because then
    only the remaining processes of the group have it. Without pidfds, the leader counts as alive.
    """

    def __init__(self, leader: int) -> None:
        self._number = leader
        self._pidfd = -1
        self._is_reaped = False
        self._is_closed = False
        try:
            self._pidfd = os.pidfd_open(leader)
        except ProcessLookupError:
            self._is_reaped = True
        except OSError as error:
            if error.errno not in _NO_PIDFDS:
                raise

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the group, or to the leader if the group does not exist yet."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError):
            if not self._send_to_leader(0) and _exists(self._number):
                return  # another process has the id
            try:
                os.killpg(self._number, number)
            except ProcessLookupError:
                self._send_to_leader(number)

    def close(self) -> None:
        """Send no further signals. Safe to call twice."""
        if not self._is_closed and self._pidfd >= 0:
            os.close(self._pidfd)
        self._is_closed = True

    def _send_to_leader(self, number: int) -> bool:
        """Signal the leader alone; return False if it is reaped."""
        if self._is_reaped:
            return False
        try:
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)
            else:
                os.kill(self._number, number)
        except ProcessLookupError:
            return False
        return True


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
