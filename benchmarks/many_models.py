"""What a request costs where many models, versions or workers are: no more than with one.

Idle models have no workers, as those that wait for somebody to scale them up. Each number of models
has a server of its own, and the servers take turns.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import wrk
from processes import Marserve, pack
from report import Row

_BODY_BYTES = 1024
_CLIENTS = 64
_BATCHING = "batch_size=32&max_batch_delay=2"
_FLAT = 1.05  # what two runs of the same server differ by, even on a quiet machine
_HANDLER = Path(__file__).with_name("noop_handler.py")


def measure(directory: Path, quick: bool) -> list[Row]:
    """Rate and processor time of each server, in turn, against that with one model."""
    repetitions, seconds = (2, 1) if quick else (5, 3)
    body = directory / "body"
    body.write_bytes(bytes(_BODY_BYTES))
    turns: dict[str, list[_Turn]] = {name: [] for name in _SERVERS}
    with ExitStack() as running:
        servers = {}
        for name, fill in _SERVERS.items():
            servers[name] = _start(running, directory / name.replace(" ", "-"))
            fill(servers[name])
        for _ in range(repetitions):
            for name, server in servers.items():
                turns[name].append(_turn(server, body, seconds))
    one, *others = turns
    return [row for name in others for row in _rows(name, turns[name], one, turns[one])]


@dataclass(frozen=True)
class _Turn:
    rate: float  # answers per second
    cpu_us: float  # of the frontend, per answer


def _turn(server: Marserve, body: Path, seconds: int) -> _Turn:
    target = wrk.Target(server.inference_port, "/predictions/noop", body)
    frontend = psutil.Process(server.pid)
    before = frontend.cpu_times()
    rate = wrk.measure(target, _CLIENTS, seconds).rate
    after = frontend.cpu_times()
    busy = after.user + after.system - before.user - before.system
    return _Turn(rate, busy / (rate * seconds) * 1e6)


def _rows(name: str, ours: list[_Turn], one: str, theirs: list[_Turn]) -> list[Row]:
    named = f"noop, {_CLIENTS} clients, {name}"
    cost, its_cost = [turn.cpu_us for turn in ours], [turn.cpu_us for turn in theirs]
    rate, its_rate = [turn.rate for turn in ours], [turn.rate for turn in theirs]
    # Two workers share the requests, so their batches are smaller: no goal.
    goal = None if "worker" in name else _FLAT
    return [
        Row(f"{named}: frontend, CPU us/request", cost, one, its_cost, at_most=goal),
        Row(f"{named}: req/s", rate, one, its_rate),
    ]


def _start(running: ExitStack, directory: Path) -> Marserve:
    """A server with one version of one model, which has one worker."""
    directory.mkdir()
    pack(directory / "store", {"model-name": "noop", "handler": _HANDLER})
    server = running.enter_context(Marserve(directory).running())
    server.manage("POST", f"/models?url=noop.mar&{_BATCHING}&initial_workers=1&synchronous=true")
    return server


def _add_models(total: int, server: Marserve) -> None:
    for number in range(1, total):
        server.manage("POST", f"/models?url=noop.mar&model_name=idle-{number}&initial_workers=0")


def _add_versions(total: int, server: Marserve) -> None:
    for number in range(2, total + 1):
        name = f"version-{number}"
        store = server.directory / "store"
        pack(store, {"model-name": name, "handler": _HANDLER, "version": f"{number}.0"})
        server.manage("POST", f"/models?url={name}.mar&model_name=noop&initial_workers=0")


def _add_worker(server: Marserve) -> None:
    server.manage("PUT", "/models/noop?min_worker=2&synchronous=true")


_SERVERS: dict[str, Callable[[Marserve], None]] = {
    "1 model": partial(_add_models, 1),
    "100 models": partial(_add_models, 100),
    "1,000 models": partial(_add_models, 1000),
    "8 versions": partial(_add_versions, 8),
    "2 workers": _add_worker,
}
