"""Helper processes: what foreign files decide the cost of, done where it can be killed.

See `helper` for what they do and their limits of memory and processor time. Here are those of time:
for the whole operation, and for how long one may show no progress. One that exceeds them, or that
nobody waits for any more, is killed.
"""

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from marserve.backend.processes.bootstrap import as_program
from marserve.frontend import errors
from marserve.frontend.aio.background import Slots
from marserve.frontend.archives import helper
from marserve.frontend.errors import ArchiveRefused, ServeError, ServerBusy
from marserve.frontend.process_group import ProcessGroup

logger = logging.getLogger(__name__)

_ENDS = {
    -signal.SIGXCPU: "it took too much time on a processor",
    -signal.SIGKILL: "it was killed, perhaps for want of memory",
}
_KILL_SECONDS = 5.0  # in which a process is gone after SIGKILL, unless a disk holds it


class HelperProcesses:
    """Runs operations in processes of their own, so many at once.

    Args:
        slots: How many.
        timeout: Seconds for each, its wait in line included.
        stall: Seconds that one may show no progress. Many, because on some file systems one call
            takes minutes: to fetch all of an archive when its first byte is read, to send all of a
            file when it is closed.
    """

    def __init__(self, slots: Slots, timeout: float, stall: float = 600.0) -> None:
        self._slots = slots
        self._timeout = timeout
        self._stall = stall

    async def run(self, operation: str, **arguments: Any) -> Any:
        """Have an operation of `helper` carried out; cancelled, its process is killed at once.

        What it has made by then is for the caller to remove.

        Raises:
            ServerBusy: There are too many already.
            ServeError: As the operation; also where it takes too long, or too much memory.
            OSError: As the operation, or no process could be started.
        """
        has_begun = False
        try:
            async with asyncio.timeout(self._timeout), self._slots.taken():
                has_begun = True
                answer = await self._ask({"operation": operation, **arguments})
        except TimeoutError as error:
            late = f"took more than {self._timeout:g} s (unpack_timeout)."
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

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        async with _process() as process:
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(ConnectionError):  # its status tells more
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            line = b"\n"
            while line == b"\n":  # that it gets on
                try:
                    async with asyncio.timeout(self._stall):
                        line = await process.stdout.readline()
                except TimeoutError as error:
                    raise ArchiveRefused(
                        f"Reading the archive did not get on for {self._stall:g} s."
                    ) from error
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
            status = await process.wait()
        if reason := _ENDS.get(status):
            raise ArchiveRefused(f"The archive could not be read: {reason}.")
        raise ServeError(f"The process that reads archives ended with exit status {status}.")


@contextlib.asynccontextmanager
async def _process() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *as_program(helper.__name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=2 * helper.MAX_ANSWER_BYTES,
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
