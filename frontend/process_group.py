"""Sends signals to processes and their groups, never to others that reuse their ids."""

import contextlib
import errno
import os
import signal

# Kernels before 5.3, and sandboxes without the call.
_NO_PIDFDS = (errno.ENOSYS, errno.EPERM)


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


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True
