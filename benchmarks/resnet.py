"""What a real model loses by being served: ResNet-152 on the CPU, against its handler in a loop."""

import os
import subprocess
import sys
from pathlib import Path

from load import Plan, generate
from processes import Marserve
from report import Row
from resnet152 import NAME, PHOTOGRAPH, pack_resnet

_BATCH_SIZE = 8
_CLIENTS = 16
_GOAL = 0.97
_LOOP = Path(__file__).with_name("bare_loop.py")


def measure(directory: Path, quick: bool) -> list[Row]:
    """Images per second of both, in turn, with the same batch size and threads."""
    repetitions, seconds = (1, 5.0) if quick else (8, 10.0)
    model = pack_resnet(directory)
    served, bare = [], []
    with (
        Marserve(directory).running() as server,
        server.model(NAME, batch_size=_BATCH_SIZE, max_batch_delay=50),
    ):
        for _ in range(repetitions):
            bare.append(_run_bare_loop(model, seconds))
            served.append(_run_served(server, seconds))
        jobs = server.counted("marserve_batch_size_sum")
        batch_size = jobs / server.counted("marserve_batch_size_count")
    name = f"ResNet-152, {_CLIENTS} clients, batch {batch_size:.3g}: images/s"
    return [Row(name, served, "bare loop", bare, at_least=_GOAL)]


def _run_served(server: Marserve, seconds: float) -> float:
    plan = Plan(
        server.inference_port,
        f"/predictions/{NAME}",
        str(PHOTOGRAPH),
        _CLIENTS,
        seconds,
        warm_up=2.0,
        step=_BATCH_SIZE,
    )
    return generate(plan).rate


def _run_bare_loop(model: Path, seconds: float) -> float:
    # The server gives its only worker every core; so does this.
    threads = len(os.sched_getaffinity(0))
    command = [sys.executable, _LOOP, model, PHOTOGRAPH, _BATCH_SIZE, seconds, threads]
    finished = subprocess.run(
        list(map(str, command)), stdout=subprocess.PIPE, check=True, timeout=seconds + 120
    )
    return float(finished.stdout)
