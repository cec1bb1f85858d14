"""Ends a server whose stop takes too long.

A thread that waits for a disk, or code that blocks the event loop, would delay it without end. So a
thread that needs neither counts from the moment that a stop is requested. When the time is over, it
logs what still runs, kills the child processes, removes the files and ends the process with status
1, in `FORCED_END_SECONDS` at most.

It cannot run while compiled code holds Python's lock. If that happens after the stop was requested,
`faulthandler` ends the process.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from marserve.frontend.lifecycle.daemon import FORCED_END_SECONDS
from marserve.frontend.lifecycle.workdir import remove_with_processes
from marserve.frontend.logs.writers import wait_written

logger = logging.getLogger(__name__)

# Each step has a part of the time, since it may hang, too.
_REPORT_SECONDS = 2.0
_REMOVAL_SECONDS = 7.0
_SWITCH_SECONDS = 0.0002
_MAX_TASKS = 20  # in the log
_STATUS = 1


class StopWatchdog:
    """Counts the time of a stop from `begin` to the end of the process.

    A stop may take ``seconds``; ``release`` removes further files after that.
    """

    def __init__(self, seconds: float, release: Callable[[], object] = lambda: None) -> None:
        self._seconds = seconds
        self._release = release
        #: Removed at a forced end, with the server's processes.
        self.workdir: Path | None = None
        #: Its tasks are reported at a forced end.
        self.loop: asyncio.AbstractEventLoop | None = None
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        threading.Thread(target=self._run, name="stop-watchdog", daemon=True).start()

    def begin(self) -> None:
        """Count from now on; takes no lock, so that signal handlers may call it."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"!")

    def _run(self) -> None:
        os.read(self._reader, 1)  # no deadline: it waits for the stop
        faulthandler.dump_traceback_later(
            self._seconds + FORCED_END_SECONDS, exit=True, file=sys.__stderr__ or 2
        )
        time.sleep(self._seconds)
        # How often a busy thread releases Python's lock, which each look at a process needs several
        # times.
        sys.setswitchinterval(_SWITCH_SECONDS)
        for step, seconds in ((self._report, _REPORT_SECONDS), (self._remove, _REMOVAL_SECONDS)):
            thread = threading.Thread(target=step, daemon=True)
            thread.start()
            thread.join(seconds)
        os._exit(_STATUS)

    def _report(self) -> None:
        logger.critical(
            "The stop took more than %g s (lame_duck_seconds, drain_timeout and stop_grace); the "
            "server is ended by force. Still running:\n%s",
            self._seconds,
            "\n".join([*_tasks(self.loop), _stacks()]),
        )
        wait_written()  # by the threads of the logs, which the end of the process ends

    def _remove(self) -> None:
        self._release()
        if self.workdir is not None:
            remove_with_processes(self.workdir)


def _tasks(loop: asyncio.AbstractEventLoop | None) -> Iterable[str]:
    if loop is None:
        return []
    with contextlib.suppress(RuntimeError):  # the set changed during the iteration
        return [repr(task)[:500] for task in list(asyncio.all_tasks(loop))[:_MAX_TASKS]]
    return []


def _stacks() -> str:
    with open(os.memfd_create("stacks"), "r+b") as file:  # noqa: PTH123 - no path: a disk may hang
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
