"""Starts, controls and ends the processes of the load generator."""

import asyncio
import importlib.util
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.record import Record

_LONGEST_LINE = 2**30  # bytes; the line of a record contains the cause of each failure
_START_IN = 0.1  # seconds until all processes have read the moment of the start


class Listener:
    """Receives the events of a run; this base class ignores them."""

    def measuring(self) -> None:
        """Receive the end of the warm-up."""

    def counted(self, count: int) -> None:
        """Receive the number of finished requests."""


async def generate(
    load: Load,
    destination: Destination,
    requests: Sequence[bytes],
    *,
    processes: int = 1,
    listener: Listener | None = None,
) -> tuple[Record, float]:
    """Put a load on a server from separate processes.

    Args:
        load: The total load of all processes.
        destination: The server.
        requests: The bytes of HTTP requests, sent in turn by each process.
        processes: Largest number of processes.
        listener: Receives the events of the run.

    Returns:
        The merged record, and the moment of the end of the warm-up.

    Raises:
        ServerUnreachable: Connections are refused before the load begins.
        BenchError: A process of the load generator died, or httptools is not installed.
    """
    if importlib.util.find_spec("httptools") is None:
        raise BenchError("The load generator needs httptools: pip install httptools.")
    run = _Run(destination, requests, listener or Listener())
    async with AsyncExitStack() as started:
        shares = load.shared(processes)
        children = [await started.enter_async_context(_started(run, share)) for share in shares]
        await asyncio.gather(*(child.connected() for child in children))
        start = time.monotonic() + _START_IN
        records = await asyncio.gather(*(child.record(start) for child in children))
    for record in records[1:]:
        records[0].extend(record)
    return records[0], start + load.warm_up


class _Run:
    def __init__(
        self, destination: Destination, requests: Sequence[bytes], listener: Listener
    ) -> None:
        self.destination = destination
        self.requests = requests
        self._listener = listener
        self._counts: dict[_Child, int] = {}
        self._is_measuring = False

    def receive(self, child: "_Child", message: dict[str, Any]) -> None:
        if message["event"] == "count":
            self._counts[child] = message["count"]
            self._listener.counted(sum(self._counts.values()))
        elif not self._is_measuring:
            self._is_measuring = True
            self._listener.measuring()


@asynccontextmanager
async def _started(run: _Run, load: Load) -> AsyncIterator["_Child"]:
    # -P, new in Python 3.11: a file of the working directory must not replace a module.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *safe_path,
        "-m",
        "marserve.tools.bench.generator.program",
        stdin=PIPE,
        stdout=PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl-C must not reach the child
    )
    try:
        yield _Child(run, load, process)
    except BaseException:
        _kill(process)
        raise
    finally:
        # communicate also reads the pipe to its end; its transport would stay open otherwise.
        await process.communicate()


def _kill(process: Process) -> None:
    # Not process.kill(): it polls the child first and so takes the exit status from asyncio's
    # waiting thread, which then warns about an unknown child.
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


class _Child:
    """One process of the load generator."""

    def __init__(self, run: _Run, load: Load, process: Process) -> None:
        self._run = run
        self._load = load
        self._process = process

    async def connected(self) -> None:
        """Send the order to the process, and wait until its connections are open."""
        requests = self._run.requests
        order = {
            "load": asdict(self._load),
            "destination": asdict(self._run.destination),
            "lengths": list(map(len, requests)),
        }
        await self._write(json.dumps(order).encode(), b"\n", *requests)
        message = await self._receive()
        if message["event"] == "refused":
            raise ServerUnreachable(
                f"Nothing to measure at {self._run.destination.url}: {message['why']}."
            )

    async def record(self, start: float) -> Record:
        """Run the load, and return its record."""
        await self._write(json.dumps({"start": start}).encode(), b"\n")
        while (message := await self._receive())["event"] != "finished":
            self._run.receive(self, message)
        line = await self._read(self._stdout.readline())
        return Record.from_bytes(line, await self._body(Record.body_length(line)))

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    async def _write(self, *pieces: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # the next read reports the death
            self._process.stdin.writelines(pieces)
            await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(await self._read(self._stdout.readline()))
        return message

    async def _body(self, length: int) -> bytes:
        return await self._read(self._stdout.readexactly(length)) if length else b""

    async def _read(self, reading: Awaitable[bytes]) -> bytes:
        """Read without a deadline: the child has those of its load, and its death ends the pipe."""
        try:
            read = await reading
        except asyncio.IncompleteReadError:
            read = b""
        if not read:
            status = await self._process.wait()
            raise BenchError(f"The load generator died (status {status}).")
        return read


def generate_now(
    load: Load, destination: Destination, requests: Sequence[bytes], **how: Any
) -> tuple[Record, float]:
    """Run `generate` in a new event loop."""
    return asyncio.run(generate(load, destination, requests, **how))
