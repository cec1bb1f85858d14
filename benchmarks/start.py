"""How long until it answers, how much memory it sits on, how fast a second worker comes."""

import time
from pathlib import Path

import psutil
from processes import Marserve
from report import Row
from resnet152 import NAME, pack_resnet

_PING_SECONDS = 1.0
_FRONTEND_MB = 80.0
_SCALE_MS = 100.0


def measure(directory: Path, quick: bool) -> list[Row]:
    """Start-up, memory and scaling, each against its fixed limit."""
    repetitions = 2 if quick else 7
    pack_resnet(directory)
    pings, memory = zip(*(_start_once(directory) for _ in range(repetitions)), strict=True)
    added = _scale(directory, 2 if quick else 5)
    return [
        Row("process start to first /ping 200: s", pings, "limit", [_PING_SECONDS], at_most=1),
        Row("frontend idle, resident: MB", memory, "limit", [_FRONTEND_MB], at_most=1),
        Row("second worker READY, beyond its load: ms", added, "limit", [_SCALE_MS], at_most=1),
    ]


def _start_once(directory: Path) -> tuple[float, float]:
    """Seconds to the first answer of /ping; MB resident a while later."""
    with Marserve(directory).running() as server:
        time.sleep(3)  # its own start-up work is over, and the fork server's imports are
        return server.seconds_to_ping, psutil.Process(server.pid).memory_info().rss / 1e6


def _scale(directory: Path, repetitions: int) -> list[float]:
    """Milliseconds from asking for a second worker to READY, less what loading itself took."""
    added = []
    with Marserve(directory).running() as server, server.model(NAME):
        for _ in range(repetitions):
            started = time.perf_counter()
            server.manage("PUT", f"/models/{NAME}?min_worker=2&synchronous=true")
            elapsed = time.perf_counter() - started
            added.append((elapsed - server.loads()[-1]) * 1000)
            server.manage("PUT", f"/models/{NAME}?min_worker=1&max_worker=1&synchronous=true")
    return added
