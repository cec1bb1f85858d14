"""A model whose cost is no line, at high load: never measured, and profiled while it loads.

Part of ``batching.py``. Larger batches than 16 take 75 ms more: a model that takes whatever waits
runs full batches only, whose throughput is too low, and never learns what batches of 16 would take.
"""

from pathlib import Path
from typing import Any

import open_loop
import report
import yaml
from processes import Marserve, pack

_HERE = Path(__file__).resolve().parent
_SIZE, _GOAL_MS, _LOAD = 32, 250, 0.95
_COSTS = {"perBatchMs": 20.0, "perRequestMs": 1.75, "sigma": 0.0, "cliff": 16, "jumpMs": 75.0}
_BLOCK = 1000  # requests
_STARTS = ("cold", "profiled")


def measure(directory: Path, *, quick: bool) -> list[tuple[str, ...]]:
    """Rows of a table: the share answered in time, of block after block of requests."""
    repetitions, blocks = (1, 2) if quick else (3, 6)
    directory.mkdir()
    for start in _STARTS:
        _pack(directory, start)
    body = Path(directory, "body")
    body.write_bytes(bytes(1024))
    shares: dict[str, list[list[float]]] = {start: [] for start in _STARTS}
    with Marserve(directory).running() as server:
        for seed in range(repetitions):
            for start in _STARTS:
                shares[start].append(_blocks(server, start, body, blocks, seed))
    heading = (f"blocks of {_BLOCK} requests", *(str(at + 1) for at in range(blocks)))
    return [heading, *(_row(start, runs) for start, runs in shares.items())]


def _blocks(server: Marserve, start: str, body: Path, blocks: int, seed: int) -> list[float]:
    """Register the model anew, and put one run of load on it."""
    best = (
        1000 * _COSTS["cliff"] / (_COSTS["perBatchMs"] + _COSTS["perRequestMs"] * _COSTS["cliff"])
    )
    rate = _LOAD * best
    with server.model(f"{start}.mar", batch_size=_SIZE, max_latency_ms=_GOAL_MS):
        return open_loop.shares_in_time(
            open_loop.Arrivals(
                server.inference_port,
                f"/predictions/{start}",
                str(body),
                rate,
                blocks * _BLOCK / rate,
                _GOAL_MS / 1000,
                seed,
                warm_up=0.0,
            ),
            blocks,
        )


def _row(start: str, runs: list[list[float]]) -> tuple[str, ...]:
    return (start, *(report.spread([100 * run[at] for run in runs]) for at in range(len(runs[0]))))


def _pack(directory: Path, start: str) -> None:
    config: dict[str, Any] = {"costs": _COSTS}
    files: dict[str, str | Path] = {}
    if start == "profiled":
        sample = directory / "sample"
        sample.write_bytes(bytes(1024))
        config["sampleInput"] = sample.name
        files["extra-files"] = sample
    file = directory / f"{start}.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    handler = _HERE / "cost_curve_handler.py"
    pack(
        directory / "store",
        {"model-name": start, "handler": handler, "config-file": file, **files},
    )
