"""Helper processes (`helper`), which are killed when they exceed a time or are not needed any more.

Two times are limited: that of the whole operation, and that without progress.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from marserve.backend.processes.bootstrap import as_program
from marserve.frontend import errors
from marserve.frontend.aio.background import Slots
from marserve.frontend.archives import helper
from marserve.frontend.errors import ArchiveRefused, ServeError, ServerBusy
from marserve.frontend.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_ENDS = {
    -signal.SIGXCPU: "it took too much processor time",
    -signal.SIGKILL: "it was killed, perhaps because memory was short",
}
_KILL_SECONDS = 5.0  # for which a killed process is waited for; a disk may hold it longer


@dataclass(frozen=True)
class HelperProcesses:
    """Runs each operation in a new process."""

    slots: Slots
    timeout: float  # seconds of an operation, including its wait for a slot
    # Seconds without progress. Some file systems fetch a whole archive when its first byte is read,
    # or send a whole file when it is closed, which takes minutes.
    stall: float = 600.0

    async def run(self, operation: str, **arguments: Any) -> Any:
        """Run an operation of `helper` and return its result; a cancellation kills the process.

        The caller removes what a failed operation has written.

        Raises:
            ServeError: Raised by the operation, or it took too long or too much memory.
            OSError: Raised by the operation, or no process could be started.
        """
        has_begun = False
        try:
            async with asyncio.timeout(self.timeout), self.slots.taken():
                has_begun = True
                answer = await self._run({"operation": operation, **arguments})
        except TimeoutError as error:
            late = f"took more than {self.timeout:g} s (unpack_timeout)."
            if not has_begun:
                raise ServerBusy(f"Waiting for other archives {late}") from error
            raise ArchiveRefused(f"Reading the archive {late}") from error
        for level, message in answer.get("log", ()):
            logger.log(level, "%s", message)
        if "refused" in answer:
            raise getattr(errors, answer["refused"])(answer["message"])
        if "failed" in answer:
            number, text, file = answer["failed"]
            raise OSError(text) if number is None else OSError(number, text, file)
        return answer["result"]

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        async with child_process(
            sys.executable,
            *as_program(helper.__name__),
            stdin=asyncio.subprocess.PIPE,
            limit=2 * helper.MAX_ANSWER_BYTES,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(ConnectionError):  # the exit status says more
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            line = b"\n"
            while line == b"\n":  # progress
                try:
                    async with asyncio.timeout(self.stall):
                        line = await process.stdout.readline()
                except TimeoutError as error:
                    raise ArchiveRefused(
                        f"Reading the archive made no progress for {self.stall:g} s."
                    ) from error
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            status = await process.wait()
        if reason := _ENDS.get(status):
            raise ArchiveRefused(f"The archive could not be read: {reason}.")
        raise ServeError(f"The process that reads archives ended with exit status {status}.")


@contextlib.asynccontextmanager
async def child_process(*argv: str, **options: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a program with a pipe for its output; the end of the block kills it."""
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, start_new_session=True, **options
    )
    group = ProcessGroup(process.pid)
    try:
        yield process
    finally:
        if process.returncode is None:
            group.send(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL_SECONDS)
        group.close()
