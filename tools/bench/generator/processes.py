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

_LONGEST_LINE = 2**30  # bytes: the line of a record names what became of each failed request
_START_IN = 0.1  # seconds until all processes have read when to start


class Listener:
    """Is told how a run goes; this one does not care."""

    def measuring(self) -> None:
        """The warm-up is over."""

    def counted(self, count: int) -> None:
        """So many requests have come to an end by now."""


async def generate(
    load: Load,
    destination: Destination,
    requests: Sequence[bytes],
    *,
    processes: int = 1,
    listener: Listener | None = None,
) -> tuple[Record, float]:
    """Put a load on a server, from processes of its own.

    Args:
        load: As a whole; it is shared out.
        destination: Where to.
        requests: The bytes of HTTP requests, sent in turn by each process.
        processes: At most so many.
        listener: Told how it goes.

    Returns:
        What came of it, merged, and the moment when the warm-up was over.

    Raises:
        ServerUnreachable: Connections are refused before the load begins.
        BenchError: A process of the load generator died, or lacks what it needs.
    """
    if importlib.util.find_spec("httptools") is None:
        raise BenchError("The load generator needs httptools: pip install 'marserve[bench]'.")
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

    def heard(self, child: "_Child", news: dict[str, Any]) -> None:
        """A child says how it goes."""
        if news["event"] == "count":
            self._counts[child] = news["count"]
            self._listener.counted(sum(self._counts.values()))
        elif not self._is_measuring:
            self._is_measuring = True
            self._listener.measuring()


@asynccontextmanager
async def _started(run: _Run, load: Load) -> AsyncIterator["_Child"]:
    # -P, new in Python 3.11: the working directory may hold a file named like one of ours.
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *safe_path,
        "-m",
        "marserve.tools.bench.generator.program",
        stdin=PIPE,
        stdout=PIPE,
        limit=_LONGEST_LINE,
        start_new_session=True,  # Ctrl-C is for us: we end it in order
    )
    try:
        yield _Child(run, load, process)
    except BaseException:
        _kill(process)
        raise
    finally:
        # Reading to the end as well, or the pipe's transport would stay open.
        await process.communicate()


def _kill(process: Process) -> None:
    # Not process.kill(): that looks first whether it lives, and takes its exit status away from the
    # thread that waits for it. asyncio then complains of an unknown child.
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
        """Wait until its connections are open."""
        requests = self._run.requests
        order = {
            "load": asdict(self._load),
            "destination": asdict(self._run.destination),
            "lengths": list(map(len, requests)),
        }
        await self._write(json.dumps(order).encode(), b"\n", *requests)
        news = await self._news()
        if news["event"] == "refused":
            raise ServerUnreachable(
                f"Nothing to measure at {self._run.destination.url}: {news['why']}."
            )

    async def record(self, start: float) -> Record:
        """Let it run; what came of it."""
        await self._write(json.dumps({"start": start}).encode(), b"\n")
        while (news := await self._news())["event"] != "finished":
            self._run.heard(self, news)
        line = await self._read(self._stdout.readline())
        return Record.from_bytes(line, await self._body(Record.body_length(line)))

    @property
    def _stdout(self) -> asyncio.StreamReader:
        assert self._process.stdout is not None
        return self._process.stdout

    async def _write(self, *pieces: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(ConnectionError):  # what it died of is told where it is read
            self._process.stdin.writelines(pieces)
            await self._process.stdin.drain()

    async def _news(self) -> dict[str, Any]:
        news: dict[str, Any] = json.loads(await self._read(self._stdout.readline()))
        return news

    async def _body(self, length: int) -> bytes:
        return await self._read(self._stdout.readexactly(length)) if length else b""

    async def _read(self, reading: Awaitable[bytes]) -> bytes:
        """No deadline: the child keeps those of its load, and its death ends the pipe."""
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
    """`generate` for those who have no event loop."""
    return asyncio.run(generate(load, destination, requests, **how))
