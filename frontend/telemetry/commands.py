"""Programs that measure something: run with a deadline and a limit on what they print."""

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from marserve.frontend.process_group import ProcessGroup

_MAX_BYTES = 1 << 20
_STDIN, _STDOUT, _STDERR = range(3)
# Nothing outlives SIGKILL for longer, unless the kernel itself hangs.
_END_SECONDS = 5.0


@dataclass(frozen=True)
class Output:
    """What a program wrote; complete if it closed both outputs in time and within the limit."""

    stdout: str
    stderr: str
    is_complete: bool


async def run_command(argv: Sequence[str], *, stdin: str = "", timeout: float) -> Output:
    """Run a program; when this ends, so have the program and its children.

    It is killed after ``timeout`` seconds, or when it writes more than a megabyte. Not asyncio's
    streams: their `wait` waits for pipes that a paused reader never sees closed.

    Raises:
        OSError: It cannot be started.
    """
    loop = asyncio.get_running_loop()
    transport, listener = await loop.subprocess_exec(_Listener, *argv, start_new_session=True)
    group = ProcessGroup(transport.get_pid())
    try:
        with contextlib.suppress(OSError, RuntimeError):  # of uvloop, where it reads no more
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
    """Collects what a program writes."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        #: Whether it closed both outputs, or wrote too much.
        self.complete: asyncio.Future[bool] = loop.create_future()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.written = (bytearray(), bytearray())
        self._open = {_STDOUT, _STDERR}

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """Called by the loop."""
        written = self.written[fd - _STDOUT]
        room = _MAX_BYTES - len(written)
        written += data[:room]
        if len(data) > room:
            self._finish(is_complete=False)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:  # noqa: ARG002 - the loop's signature
        """Called by the loop."""
        self._open.discard(fd)
        if not self._open:
            self._finish(is_complete=True)

    def process_exited(self) -> None:
        """Called by the loop."""
        self.exited.set_result(None)

    def _finish(self, *, is_complete: bool) -> None:
        if not self.complete.done():
            self.complete.set_result(is_complete)
