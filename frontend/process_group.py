"""Sends signals to a process group, and never to another process that reuses its id."""

import contextlib
import errno
import os
import signal

# Kernels before 5.3, and sandboxes that do not know the call.
_NO_PIDFDS = (errno.ENOSYS, errno.EPERM)


class ProcessGroup:
    """The group that a process leads, or will lead in a moment.

    The kernel gives a number to another process when its bearer has been reaped and no group bears
    it any more; and a worker that has lost its parent, the fork server, is reaped by somebody else.
    So a signal is sent while the leader is there, reaped by nobody, which its pidfd tells; or when
    no process at all has the number, for then only what the leader left behind can be a group of
    it. Where there are no pidfds, the leader counts as there.

    Raises:
        OSError: There is no descriptor left.
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
        """Send a signal to all of the group; to the leader alone, if it has not founded it yet."""
        if self._is_closed:
            return
        with contextlib.suppress(ProcessLookupError):
            if not self._send_to_leader(0) and _exists(self._number):
                return  # somebody else's number by now
            try:
                os.killpg(self._number, number)
            except ProcessLookupError:
                self._send_to_leader(number)

    def close(self) -> None:
        """Send nothing any more. Safe to call twice."""
        if not self._is_closed and self._pidfd >= 0:
            os.close(self._pidfd)
        self._is_closed = True

    def _send_to_leader(self, number: int) -> bool:
        """Signal the leader alone; false where it has been reaped."""
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
