"""How the processes of a runner ended: what the runner itself only writes into its output.

A runner that has lost one of its processes ends the others, and then itself with exit status 1. If
it ends as the first of them did, the frontend sees what it would have seen of a process of its own.
"""

import contextlib
import os
import resource
import signal
import sys
import threading


class FirstEnd:
    """The end of the first child that did not end well; the others mostly follow from it."""

    def __init__(self) -> None:
        self._noting = threading.Lock()
        self._status = 0

    def watch(self, pid: int) -> threading.Thread:
        """Note how a child ends; whoever started it still gets to know, too.

        Returns:
            The thread that waits for it.
        """
        thread = threading.Thread(target=self._watch, args=(pid,), daemon=True)
        thread.start()
        return thread

    def repeat(self) -> None:
        """End this process in the same way; returns where all are well."""
        with self._noting:
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
        with self._noting:
            self._status = self._status or status
