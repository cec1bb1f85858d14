"""How soon it answers, how much memory it sits on, how fast its workers come and come back."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from processes import Marserve
from report import Row
from resnet152 import NAME, pack_resnet

_PING_SECONDS = 1.0
_FRONTEND_MB = 80.0
_REGISTER_MS = 200.0
_SCALE_MS = 100.0
_REPLACE_MS = 200.0
_LOAD_SHARE = 0.3
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.002
# A worker that died less than five seconds after another death waits for a second.
_CALM_SECONDS = 5.2
_PLAIN_LOAD = Path(__file__).with_name("plain_load.py")


def measure(directory: Path, quick: bool) -> list[Row]:
    """Start-up, memory and workers against fixed limits; loading against doing it plainly."""
    repetitions = 2 if quick else 7
    pack_resnet(directory, archive_format="zip-store")
    pings, memory = zip(*(_start_once(directory) for _ in range(repetitions)), strict=True)
    with Marserve(directory).running() as server:
        _register(server)  # waits for the imports of the fork server
        registered, _ = zip(*(_register(server) for _ in range(repetitions)), strict=True)
        added = [_scale(server) for _ in range(repetitions)]
        with server.model(f"{NAME}.mar"):
            replaced, loads, plain = zip(
                *((*_replace(server), _plain_load(directory)) for _ in range(repetitions)),
                strict=True,
            )
    return [
        Row("process start to first /ping 200: s", pings, "limit", [_PING_SECONDS], at_most=1),
        Row("frontend idle, resident: MB", memory, "limit", [_FRONTEND_MB], at_most=1),
        # Mostly the unpacking of 240 MB, which is the disk's.
        Row("register to READY, beyond its load: ms", registered, "limit", [_REGISTER_MS]),
        Row("second worker READY, beyond its load: ms", added, "limit", [_SCALE_MS], at_most=1),
        Row(
            "killed worker READY, beyond its load: ms", replaced, "limit", [_REPLACE_MS], at_most=1
        ),
        Row("ResNet-152 loaded in a worker: ms", loads, "plainly", plain, at_most=_LOAD_SHARE),
    ]


def _start_once(directory: Path) -> tuple[float, float]:
    """Seconds to the first answer of /ping; MB resident a while later."""
    with Marserve(directory).running() as server:
        time.sleep(3)  # its own start-up work is over, and the fork server's imports are
        return server.seconds_to_ping, psutil.Process(server.pid).memory_info().rss / 1e6


def _register(server: Marserve) -> tuple[float, float]:
    """Milliseconds from registration (which unpacks) to READY less what loading took; and that."""
    started = time.perf_counter()
    with server.model(f"{NAME}.mar"):
        return _beyond_load(server, time.perf_counter() - started)


def _scale(server: Marserve) -> float:
    """Milliseconds from asking for a second worker to READY, less what loading itself took."""
    with server.model(f"{NAME}.mar"):
        started = time.perf_counter()
        server.manage("PUT", f"/models/{NAME}?min_worker=2&synchronous=true")
        return _beyond_load(server, time.perf_counter() - started)[0]


def _replace(server: Marserve) -> tuple[float, float]:
    """Milliseconds from SIGKILL to the next READY, less what loading itself took; and that."""
    time.sleep(_CALM_SECONDS)
    killed = _worker(server)["pid"]
    started = time.perf_counter()
    os.kill(killed, signal.SIGKILL)
    while (worker := _worker(server))["pid"] == killed or worker["status"] != "READY":
        if time.perf_counter() - started > _PATIENCE_SECONDS:
            raise RuntimeError("A killed worker did not come back.")
        time.sleep(_POLL_SECONDS)
    return _beyond_load(server, time.perf_counter() - started)


def _worker(server: Marserve) -> dict[str, object]:
    [described] = json.loads(server.manage("GET", f"/models/{NAME}"))
    worker: dict[str, object] = described["workers"][0]
    return worker


def _beyond_load(server: Marserve, seconds: float) -> tuple[float, float]:
    load = server.loads()[-1]
    return (seconds - load) * 1000, load * 1000


def _plain_load(directory: Path) -> float:
    """Milliseconds that building and loading the model take by itself."""
    command = [sys.executable, _PLAIN_LOAD, directory / "model.py", directory / "resnet152.pth"]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=120)
    return float(finished.stdout) * 1000
