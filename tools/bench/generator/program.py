"""The program of a load generator's process.

It reads orders from standard input and writes events to standard output, one line of JSON each:

    in   {"load": ..., "destination": ..., "lengths": [...]}, then the bytes of the requests
    out  {"event": "connected"}, or {"event": "refused", "why": ...} and the end
    in   {"start": moment}: all processes start together
    out  {"event": "measuring"} when the warm-up is over
    out  {"event": "count", "count": requests so far} every `_REPORT_SECONDS`
    out  {"event": "finished"}, then a `Record`: its line and its bytes

It ends when standard output is closed, that is when its parent is gone.
"""

import asyncio
import contextlib
import gc
import json
import resource
import sys
import time
from typing import Any

import uvloop

from marserve.tools.bench.generator.closed_loop import ClosedLoop
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.open_loop import OpenLoop
from marserve.tools.bench.generator.traffic import Traffic, reason

_REPORT_SECONDS = 0.2  # seconds


def main() -> None:
    """Run the load generator with the order on standard input."""
    order = json.loads(sys.stdin.buffer.readline())
    requests = [sys.stdin.buffer.read(length) for length in order["lengths"]]
    load = Load(**order["load"])
    loop = OpenLoop if load.clients is None else ClosedLoop
    _allow_many_connections()
    # Requests create no reference cycles, and a pause would be measured as the server's.
    gc.disable()
    with contextlib.suppress(BrokenPipeError):
        uvloop.run(_generate(loop(load, requests, Destination(**order["destination"]))))


async def _generate(traffic: Traffic) -> None:
    try:
        await traffic.connect()
    except OSError as error:
        _send(event="refused", why=reason(error))
        return
    _send(event="connected")
    start = json.loads(sys.stdin.buffer.readline())["start"]
    progress = asyncio.create_task(_report_progress(traffic, start))
    load = asyncio.create_task(traffic.run(start))
    try:
        await asyncio.wait({progress, load}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        progress.cancel()
        load.cancel()
        await asyncio.gather(progress, load, return_exceptions=True)
    if not load.cancelled():
        load.result()
        _send(event="finished")
        _write(*traffic.record.to_bytes())


async def _report_progress(traffic: Traffic, start: float) -> None:
    await asyncio.sleep(start + traffic.warm_up - time.monotonic())
    _send(event="measuring")
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        _send(event="count", count=traffic.record.count)


def _send(**what: Any) -> None:
    _write(json.dumps(what).encode() + b"\n")


def _write(*pieces: bytes) -> None:
    for piece in pieces:
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


def _allow_many_connections() -> None:
    """Raise the limit of file descriptors from the usual 1024 to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    main()
