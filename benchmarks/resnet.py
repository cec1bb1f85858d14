"""What a real model loses by being served: ResNet-152, against plain torch in a loop.

On the CPU, or on the GPU if there is one.

In every mode of modes.py: the faster the model, the more there is to lose.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from load import Plan, generate
from modes import MODES, Mode, model_config
from processes import Marserve
from report import Row
from resnet152 import NAME, PHOTOGRAPH, pack_resnet

_BATCH_SIZE, _CLIENTS = (32, 128) if torch.cuda.is_available() else (8, 16)
_GOAL = 0.97
_LOOP = Path(__file__).with_name("bare_loop.py")
_COMPILING_SECONDS = 1200.0


def measure(directory: Path, quick: bool) -> list[Row]:
    """Images per second of both, in turn, with the same batch size and threads."""
    # torch keeps here what it compiled, so that each process after the first only looks it up.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(directory / "compiled")
    with Marserve(directory).running() as server:
        return [_measure_mode(server, directory, name, quick) for name in MODES]


def _measure_mode(server: Marserve, directory: Path, name: str, quick: bool) -> Row:
    mode, (repetitions, seconds) = MODES[name], (1, 4.0) if quick else (3, 8.0)
    model = pack_resnet(directory, model_config(mode, _BATCH_SIZE))
    served, bare = [], []
    before = _batches(server)
    with server.model(NAME, batch_size=_BATCH_SIZE, max_batch_delay=50):
        for _ in range(repetitions):
            bare.append(_run_bare_loop(model, mode, seconds))
            served.append(_run_served(server, seconds))
        jobs, batches = (now - then for now, then in zip(_batches(server), before, strict=True))
    shutil.rmtree(model)
    title = f"ResNet-152 {name}, {_CLIENTS} clients, batch {jobs / batches:.3g}: images/s"
    print(f"  {title}: {served} / {bare}", file=sys.stderr, flush=True)
    return Row(title, served, "bare loop", bare, at_least=_GOAL)


def _batches(server: Marserve) -> tuple[float, float]:
    """The requests that were answered so far, and in how many batches."""
    return (
        server.counted("marserve_batch_size_sum"),
        server.counted("marserve_batch_size_count"),
    )


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


def _run_bare_loop(model: Path, mode: Mode, seconds: float) -> float:
    # The server gives its only worker every core; so does this.
    threads = len(os.sched_getaffinity(0))
    command = [sys.executable, _LOOP, model, PHOTOGRAPH, _BATCH_SIZE, seconds, threads]
    finished = subprocess.run(
        [*map(str, command), json.dumps(mode)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=seconds + _COMPILING_SECONDS,
    )
    return float(finished.stdout)
