"""Whether memory stays where it is: a million requests, and what else a server lives through.

Growth is counted from a tenth of the requests on, when pools, caches and the allocator have found
their size. It is USS that is counted, what a process has to itself.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import psutil
import soak_clients
import uvloop
from load import Plan, generate
from processes import Marserve, pack
from report import Row

_NAME = "soak"
_PATH = f"/predictions/{_NAME}"
_CLIENTS = 64
_BATCH_SIZE = 32
_WINDOW_MS = 2
_REQUESTS = 1_000_000
_OTHERS = 50_000
_REGISTRATIONS = 300
_GROWTH_MB = 2.0
_STEP_SECONDS = 5.0
_SETTLE_SECONDS = 1.0
_HANDLER = Path(__file__).with_name("soak_handler.py")


def measure(directory: Path, quick: bool) -> list[Row]:
    """What frontend and worker grow under a million requests, and the frontend under others."""
    fewer = 20 if quick else 1
    body = directory / "body"
    body.write_bytes(bytes(1024))
    pack(directory / "store", {"model-name": _NAME, "handler": _HANDLER})
    with Marserve(directory).running() as server:
        with _model(server):
            rows = _answered(server, body, _REQUESTS // fewer)
            for name, requests in soak_clients.KINDS.items():
                send = partial(_send, server, requests)
                rows.append(_others(server, name, send, _OTHERS // fewer))
        register = partial(_register, server)
        rows.append(_others(server, "register, unregister", register, _REGISTRATIONS // fewer))
    return rows


def _model(server: Marserve) -> AbstractContextManager[None]:
    return server.model(f"{_NAME}.mar", batch_size=_BATCH_SIZE, max_batch_delay=_WINDOW_MS)


def _answered(server: Marserve, body: Path, count: int) -> list[Row]:
    processes = {"frontend": psutil.Process(server.pid), "worker": _worker(server)}
    plan = Plan(server.inference_port, _PATH, str(body), _CLIENTS, _STEP_SECONDS)
    seen, samples = 0.0, list[dict[str, float]]()
    while seen < count or len(samples) < 2:
        generate(plan)
        seen = server.counted("marserve_batch_size_sum")
        if seen >= count / 10:
            time.sleep(_SETTLE_SECONDS)
            samples.append({name: _used_mb(process) for name, process in processes.items()})
        _say(f"{seen:.0f} of {count} requests")
    return [
        Row(
            f"{name}, {seen / 1e6:.2g} million requests: MB more",
            [samples[-1][name] - samples[0][name]],
            "limit",
            [_GROWTH_MB],
            at_most=1,
        )
        for name in processes
    ]


def _others(server: Marserve, name: str, send: Callable[[int], None], count: int) -> Row:
    """What the second half of them makes the frontend grow."""
    _say(f"{count} x {name}")
    frontend = psutil.Process(server.pid)
    send(count // 2)
    time.sleep(_SETTLE_SECONDS)
    before = _used_mb(frontend)
    send(count // 2)
    time.sleep(_SETTLE_SECONDS)
    grown = _used_mb(frontend) - before
    title = f"frontend, {count // 2} x {name}: MB more"
    return Row(title, [grown], "limit", [_GROWTH_MB], at_most=1)


def _send(server: Marserve, requests: soak_clients.Requests, count: int) -> None:
    uvloop.run(soak_clients.send(server.inference_port, _PATH, requests, count, _CLIENTS))


def _register(server: Marserve, count: int) -> None:
    for _ in range(count):
        with _model(server):
            pass


def _worker(server: Marserve) -> psutil.Process:
    [described] = json.loads(server.manage("GET", f"/models/{_NAME}"))
    return psutil.Process(described["workers"][0]["pid"])


def _used_mb(process: psutil.Process) -> float:
    return float(process.memory_full_info().uss / 1e6)


def _say(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)
