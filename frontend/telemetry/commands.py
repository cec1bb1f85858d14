"""Runs programs with a deadline and a limit on their output."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from marserve.frontend.process_group import ProcessGroup

_MAX_BYTES = 1 << 20
_STDIN, _STDOUT, _STDERR = range(3)
# A process ends within that after SIGKILL, unless it hangs in the kernel.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Output:
    """The output of a program; complete if it closed both files in time and within the limit."""

    stdout: str
    stderr: str
    is_complete: bool


async def run_command(argv: Sequence[str], *, stdin: str = "", timeout: float) -> Output:
    """Run a program for ``timeout`` seconds at most; at the end it and its children are killed.

    asyncio's streams cannot be used: their `wait` waits for pipes to be closed, which a paused
    reader does not notice.
    """
    loop = asyncio.get_running_loop()
    transport, listener = await loop.subprocess_exec(_Listener, *argv, start_new_session=True)
    group = ProcessGroup(transport.get_pid())
    try:
        with contextlib.suppress(OSError, RuntimeError):  # uvloop's, if its input is closed
            pipe = cast("asyncio.WriteTransport", transport.get_pipe_transport(_STDIN))
            pipe.write(stdin.encode())
            pipe.write_eof()
        await asyncio.wait({listener.complete}, timeout=timeout)
        is_complete = listener.complete.done() and listener.complete.result()
        stdout, stderr = (data.decode(errors="backslashreplace") for data in listener.written)
        return Output(stdout, stderr, is_complete)
    finally:
        group.send(signal.SIGKILL)
        await asyncio.wait({listener.exited}, timeout=_END_SECONDS)
        group.close()
        transport.close()


class _Listener(asyncio.SubprocessProtocol):
    """Collects the output of a program."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        #: True when it has closed both outputs, False when it has written too much.
        self.complete: asyncio.Future[bool] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.written = (bytearray(), bytearray())
        self._open = {_STDOUT, _STDERR}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        written = self.written[fd - _STDOUT]
        rest = _MAX_BYTES - len(written)
        written += data[:rest]
        if len(data) > rest:
            self._finish(is_complete=False)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        self._open.discard(fd)
        if not self._open:
            self._finish(is_complete=True)

    def process_exited(self) -> None:
        self.exited.set_result(None)

    def _finish(self, *, is_complete: bool) -> None:
        if not self.complete.done():
            self.complete.set_result(is_complete)
