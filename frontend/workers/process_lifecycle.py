"""Starts the process of a worker within a time limit, and finds out why it ended."""

import asyncio

from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.failures import (
    ConnectionLost,
    Disconnected,
    Poisoned,
    ResponseTimedOut,
    StartTimedOut,
)
from marserve.frontend.workers.launchers.launcher import Launcher, WorkerProcess, WorkerSpec

# How long after the end of its process a last reply may still be in the socket.
_LAST_REPLY_SECONDS = 0.5
# How long after its connection a process may end: torchrun ends its other processes first.
_EXIT_SECONDS = 5.0


async def start_in_time(launcher: Launcher, spec: WorkerSpec, timeout: float) -> WorkerProcess:
    """Start a worker, within ``timeout`` seconds.

    Raises:
        StartTimedOut: There was none in time; what comes later is ended.
        OSError: It could not be started.
    """
    # Not asyncio.wait_for: until Python 3.12 it swallows a cancellation that comes in the turn in
    # which the process does, and a worker that is to stop would begin to serve.
    starting = asyncio.ensure_future(launcher.start(spec))
    try:
        await asyncio.wait({starting}, timeout=timeout)
    except asyncio.CancelledError:
        if starting.done() and not starting.cancelled() and starting.exception() is None:
            process = starting.result()
            await process.stop(0, process.sock.close)
        starting.cancel()
        raise
    if starting.cancel():
        raise StartTimedOut(timeout)
    return starting.result()


def fail_later(connection: WorkerConnection) -> None:
    """Give up on a process that has ended though its socket is open: a child of it holds that.

    Later, because a last reply may still lie in the socket, and EOF behind it is the normal case.
    """
    loop = asyncio.get_running_loop()
    loop.call_later(_LAST_REPLY_SECONDS, connection.fail, "Worker process ended.", Disconnected)


async def find_cause(
    loss: ConnectionLost, process: WorkerProcess, setting: str, timeout: float | None
) -> str:
    """Find out why a worker was lost; returns a sentence, empty if ``loss`` says it already.

    ``setting`` is the name of the timeout that applied.
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
        return end or "It closed its connection and went on."
    return ""
