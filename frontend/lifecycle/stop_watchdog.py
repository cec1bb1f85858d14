"""Ends a server whose stop takes longer than it may, whatever of it hangs.

A stop waits for balancers and for accepted requests as long as is configured; beyond that it has
``stop_grace`` seconds for all else. A thread that waits for a disk, or an event loop that some code
holds, would make it last for ever. So a thread of this file's own, which needs neither, counts from
the moment that a stop is asked for. When the time is over it logs what still runs, kills the child
processes, removes the files and ends the process with status 1, in `FORCED_END_SECONDS` at most.

What it cannot end is a server in which compiled code keeps Python's lock for good: nothing written
in Python runs there. Where that happens after the stop was asked for, `faulthandler` ends it.
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

logger = logging.getLogger(__name__)

# Each step of the end has a share of its time, as any of them may hang, too.
_REPORT_SECONDS = 2.0
_REMOVAL_SECONDS = 7.0
_SWITCH_SECONDS = 0.0002
_MAX_TASKS = 20  # that are named in the log
_STATUS = 1


class StopWatchdog:
    """Counts the time of a stop from `begin` to the end of the process.

    Args:
        seconds: How long a stop may take.
        release: Removes what else is to go with the server.
    """

    def __init__(self, seconds: float, release: Callable[[], object] = lambda: None) -> None:
        self._seconds = seconds
        self._release = release
        self._workdir: Path | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        threading.Thread(target=self._run, name="stop-watchdog", daemon=True).start()

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Name the tasks of an event loop in the report of what still runs."""
        self._loop = loop

    def removes(self, workdir: Path) -> None:
        """Have the working directory go with the server, and all that this has started."""
        self._workdir = workdir

    def begin(self) -> None:
        """Count from now on, if it is not done already.

        It takes no lock, so a signal's handler may call it, whatever it has interrupted.
        """
        with contextlib.suppress(OSError):
            os.write(self._wake, b"!")

    def _run(self) -> None:
        os.read(self._woken, 1)  # no deadline: without a stop there is nothing to do
        faulthandler.dump_traceback_later(
            self._seconds + FORCED_END_SECONDS, exit=True, file=sys.__stderr__ or 2
        )
        time.sleep(self._seconds)
        # A thread that is busy in Python gives its lock up this often; each look at a process needs
        # it several times.
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
            "\n".join([*_tasks(self._loop), _stacks()]),
        )

    def _remove(self) -> None:
        self._release()
        if self._workdir is not None:
            remove_with_processes(self._workdir)


def _tasks(loop: asyncio.AbstractEventLoop | None) -> Iterable[str]:
    if loop is None:
        return []
    with contextlib.suppress(RuntimeError):  # they change meanwhile
        return [repr(task)[:500] for task in list(asyncio.all_tasks(loop))[:_MAX_TASKS]]
    return []


def _stacks() -> str:
    with open(os.memfd_create("stacks"), "r+b") as file:  # noqa: PTH123 - no path: a disk may hang
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read().decode(errors="replace")
