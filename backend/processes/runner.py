"""The process of a runner (torchrun, torch's launcher for CPUs), which starts those of one worker.

A runner that has lost one of its processes ends the others, and then itself with exit status 1. If
it ends as the first of them did, the frontend sees what it would have seen of a process of its own.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent, the runner, is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def become_subreaper() -> None:
    """Have what a dead rank leaves behind become our child, so that the frontend finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


class FirstFailure:
    """How the first child ended that did not end well; the others mostly follow from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._status = 0

    def watch(self, pid: int) -> threading.Thread:
        """Note how a child ends; whoever started it still gets to know, too.

        Returns:
            The thread that waits for it.
        """
        thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        thread.start()
        return thread

    def exit_alike(self) -> None:
        """End this process in the same way; returns where all are well."""
        with self._lock:
            status = self._status
        if status > 0:
            sys.exit(status)
        if status < 0:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its core already
            with contextlib.suppress(OSError):  # there is no handler of SIGKILL to take away
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)

    def _watch(self, pid: int) -> None:
        try:
            # No deadline: it is a thread for this, and ends with the process.
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:  # the runner was quicker, or has put a process in between
            return
        if end is None or end.si_status == signal.SIGTERM:  # it was told to, because of another
            return
        status = end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        with self._lock:
            self._status = self._status or status
