"""Starts the process of a worker within a time limit, and finds the cause of its loss."""

import asyncio

from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.failures import (
    ConnectionLost,
    Disconnected,
    Poisoned,
    ResponseTimedOut,
    StartTimedOut,
)
from marserve.frontend.workers.launchers.local import LocalLauncher
from marserve.frontend.workers.launchers.local_process import LocalProcess, WorkerSpec

# Time for the last reply to be read from the socket, after the end of the process.
_LAST_REPLY_SECONDS = 0.5
# Time for a process to end after its connection: torchrun ends its other processes first.
_EXIT_SECONDS = 5.0


async def start_in_time(launcher: LocalLauncher, spec: WorkerSpec, timeout: float) -> LocalProcess:
    """Start a worker.

    Raises:
        StartTimedOut: It took more than ``timeout`` seconds; the start is cancelled.
        OSError: It could not be started.
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            return await launcher.start(spec)
    except TimeoutError:
        if not limit.expired():
            raise
        raise StartTimedOut(timeout) from None


def fail_later(connection: WorkerConnection) -> None:
    """Fail the connection of a process that has ended but whose child holds the socket open.

    Not at once: usually the last reply and EOF can still be read from the socket.
    """
    loop = asyncio.get_running_loop()
    loop.call_later(_LAST_REPLY_SECONDS, connection.fail, "Worker process ended.", Disconnected)


async def find_cause(
    loss: ConnectionLost, process: LocalProcess, setting: str, timeout: float | None
) -> str:
    """Return the cause of the loss of a worker, a sentence; empty if ``loss`` contains it.

    The code of ``loss`` becomes 507 if memory ran out. ``setting`` is the name of the timeout that
    applied.
    """
    if isinstance(loss, ResponseTimedOut):
        await process.write_stacks()
        return f"Timeout: no answer within {setting} ({timeout or 0:g} s)."
    if isinstance(loss, Poisoned):
        return "Its process cannot use its GPU any more."
    if isinstance(loss, Disconnected):
        end = await process.exit_within(_EXIT_SECONDS)
        if process.ran_out_of_memory:
            loss.code = 507
        return end or "It closed its connection, but did not end."
    return ""
