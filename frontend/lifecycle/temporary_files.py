"""Keeps the temporary files of a server: the working directory, the pid file, the socket files.

Cleaners of temporary files remove what was not used for days (systemd-tmpfiles, tmpreaper, cron
jobs with ``find -mtime``). So the times of the files are set to now every hour. Files that are
removed nevertheless are made again within seconds; the loss of a socket file is only logged.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.lifecycle.workdir import WorkingDirectory, touch_tree

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
_TOUCH_SECONDS = 3600.0


@dataclass(eq=False)
class TemporaryFiles:
    """The temporary files of a server; ``keep_pid_file`` is `PidFile.keep`.

    ``sockets`` are added when they are bound.
    """

    workdir: WorkingDirectory
    keep_pid_file: Callable[[], object]
    sockets: Sequence[Path] = ()
    clock: Callable[[], float] = time.monotonic
    _lost: set[Path] = field(default_factory=set)  # socket files
    _reported: str = ""  # the last error
    _touched_at: float | None = None

    async def run(self) -> None:
        """Keep them until cancelled."""
        while True:
            await in_abandonable_thread(self.keep)
            await asyncio.sleep(_LOOK_SECONDS)

    def keep(self) -> None:
        """Look at all of them, and touch them if it is time; blocks."""
        for keep in (self.workdir.keep, self.keep_pid_file):
            try:
                keep()
            except OSError as error:
                self._report(error)
        for path in self.sockets:
            if path.exists():
                self._lost.discard(path)
            elif path not in self._lost:
                self._lost.add(path)
                logger.error("The socket file %s is gone: no client can connect to it.", path)
        now = self.clock()
        if self._touched_at is None or now - self._touched_at >= _TOUCH_SECONDS:
            self._touched_at = now
            for root in (self.workdir.path, *self.sockets):
                touch_tree(root)

    def _report(self, error: OSError) -> None:
        if str(error) == self._reported:
            return
        self._reported = str(error)
        logger.error("A temporary file of this server cannot be made again: %s", error)
