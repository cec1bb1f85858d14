"""How many threads torch should have, and how they should wait, beside busy processes.

ResNet-18 on the CPU, in batches of 8: served with the defaults, with one thread, and with threads
that spin while they wait, each against a bare loop that waits in OpenMP's own way, and against one
that waits passively. All are there all the time and take turns; beside them run none, one and two
processes that do nothing but compute. Whatever else the machine does comes on top of that.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from load import Plan, generate
from processes import Marserve, pack
from report import Row
from resnet18 import BATCH_SIZE

from marserve.frontend.workers.launchers.openmp import ACTIVE, PASSIVE, with_wait_policy

_HANDLER = Path(__file__).with_name("resnet18.py")
_SERVED: Mapping[str, Mapping[str, str | int]] = {
    "as it is": {},
    "one thread": {"torch_threads": 1},
    "active": {"torch_wait_policy": ACTIVE},
}


def measure(directory: Path, quick: bool) -> list[Row]:
    """Images per second of each way to serve, held against both bare loops."""
    repetitions, seconds = (1, 2.0) if quick else (4, 4.0)
    request = directory / "request"
    request.write_bytes(b"x")
    pack(
        directory / "store",
        {"model-name": "resnet-18", "handler": _HANDLER, "archive-format": "no-archive"},
    )
    rows = []
    with ExitStack() as stack:
        server = stack.enter_context(Marserve(directory).running())
        for name, parameters in _SERVED.items():
            _register(server, name, parameters)
        loops = {policy: stack.enter_context(_bare_loop(policy)) for policy in (ACTIVE, PASSIVE)}
        for busy in (0, 1, 2):
            bare: dict[str, list[float]] = {policy: [] for policy in loops}
            served: dict[str, list[float]] = {name: [] for name in _SERVED}
            with _busy_processes(busy):
                for _ in range(repetitions):
                    for policy, loop in loops.items():
                        bare[policy].append(_rate(loop, seconds))
                    for name in _SERVED:
                        served[name].append(_served_rate(server, name, request, seconds))
            title = f"ResNet-18, batch {BATCH_SIZE}, {busy} busy processes: images/s"
            rows += [
                Row(f"{title}, {name}", served[name], f"bare loop, {policy}", bare[policy])
                for name in _SERVED
                for policy in loops
            ]
    return rows


def _register(server: Marserve, name: str, parameters: Mapping[str, str | int]) -> None:
    query = {
        "url": "resnet-18",
        "model_name": _model(name),
        "initial_workers": 1,
        "batch_size": BATCH_SIZE,
        "max_batch_delay": 200,
        "synchronous": "true",
        **parameters,
    }
    server.manage("POST", "/models?" + "&".join(f"{key}={value}" for key, value in query.items()))


def _model(name: str) -> str:
    return f"resnet-18-{name.replace(' ', '-')}"


def _served_rate(server: Marserve, name: str, request: Path, seconds: float) -> float:
    plan = Plan(
        server.inference_port,
        f"/predictions/{_model(name)}",
        str(request),
        2 * BATCH_SIZE,
        seconds,
        step=BATCH_SIZE,
    )
    return generate(plan).rate


@contextmanager
def _bare_loop(policy: str) -> Iterator["subprocess.Popen[str]"]:
    # The server gives its only worker every core; so does this.
    command = [sys.executable, str(_HANDLER), str(len(os.sched_getaffinity(0)))]
    with subprocess.Popen(
        command,
        env=with_wait_policy(os.environ, policy),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # at which it ends


def _rate(loop: "subprocess.Popen[str]", seconds: float) -> float:
    assert loop.stdin is not None
    assert loop.stdout is not None
    loop.stdin.write(f"{seconds}\n")
    loop.stdin.flush()
    return float(loop.stdout.readline())


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for each in processes:
            each.kill()
            each.wait()
