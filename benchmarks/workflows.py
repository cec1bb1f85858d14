"""What a workflow costs: a chain and a fork of three no-op models, beside one such model.

A run asks three models, so a third of the single model's rate would be a workflow that costs
nothing; the goal is half of that. Then ten times what the chain has sustained is asked of it by an
open loop: what is refused counts, and what is accepted is to be answered.
"""

import json
from pathlib import Path

from load import Measured, Plan, generate
from load import measure as measure_load
from processes import Marserve, pack
from report import Row

from marserve.tools.archiver.workflow_archiver import (
    WorkflowArchiverConfig,
    generate_workflow_archive,
)
from marserve.tools.bench.generator.connection import REFUSED
from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.payloads import Payload

_HANDLER = Path(__file__).with_name("noop_handler.py")
_NODES = 3
_GOAL = 0.5 / _NODES
_DAGS = {"chain": "{a: [b], b: [c]}", "fork": "{a: [b, c]}"}
# Clients, batch size, window in ms.
_CASES = ((64, 32, 2), (1, 1, 0))
_OVERLOAD = 10
# More overflow the line of those who wait to be accepted, while everything uses one processor.
_MAX_CONNECTIONS = 1000


def measure(directory: Path, quick: bool) -> list[Row]:
    """Requests per second of all three, repetition by repetition in turn."""
    repetitions, seconds = (2, 1.0) if quick else (5, 3.0)
    body = directory / "body"
    body.write_text(json.dumps({"text": "x" * 1000}))
    store = directory / "store"
    pack(store, {"model-name": "noop", "handler": _HANDLER})
    rows: list[Row] = []
    with Marserve(directory).running() as server:
        for clients, size, delay in _CASES:
            for name, dag in _DAGS.items():
                _pack(store, name, dag, size, delay)
                server.manage("POST", f"/workflows?url={name}.war")
            port = server.inference_port

            def run(path: str, clients: int = clients, port: int = port) -> Measured:
                return generate(Plan(port, path, str(body), clients, seconds))

            paths = ("/predictions/noop", "/wfpredict/chain", "/wfpredict/fork")
            with server.model("noop.mar", batch_size=size, max_batch_delay=delay):
                rounds = [[run(path) for path in paths] for _ in range(repetitions)]
            single, *workflows = zip(*rounds, strict=True)
            for name, runs in zip(_DAGS, workflows, strict=True):
                label = f"{name} of {_NODES}, {clients} clients, batch {size}"
                rates = [each.rate for each in runs]
                rows.append(
                    Row(
                        f"{label}: runs/s",
                        rates,
                        "one model",
                        [each.rate for each in single],
                        _GOAL,
                    )
                )
            if clients > 1:
                rate = sorted(each.rate for each in workflows[0])[repetitions // 2]
                payload = Payload(body.read_bytes(), "application/octet-stream")
                rows += _overloaded(port, payload, rate, seconds, repetitions)
                after = [run("/wfpredict/chain").rate for _ in range(repetitions)]
                rows.append(Row("chain after that: runs/s", after, "before", [rate], 0.8))
            for name in _DAGS:
                server.manage("DELETE", f"/workflows/{name}")
    return rows


def _overloaded(
    port: int, payload: Payload, rate: float, seconds: float, repetitions: int
) -> list[Row]:
    """Ask for far more than the chain can do; all are answered or refused."""
    refused: list[float] = []
    for seed in range(repetitions):
        load = Load(
            rate=rate * _OVERLOAD,
            seconds=seconds,
            warm_up=0.5,
            seed=seed,
            max_connections=_MAX_CONNECTIONS,
        )
        part, _ = measure_load(load, port, "/wfpredict/chain", payload)
        if set(part.errors) - {"503", REFUSED}:
            raise RuntimeError(f"Neither success nor 503: {dict(part.errors)}")
        count = sum(part.errors.values())
        refused.append(count / (count + len(part.latencies)))
    answered = [1 - share for share in refused]
    label = f"chain at {_OVERLOAD} times its rate: share answered"
    return [Row(label, answered, "all that were asked", [1.0])]


def _pack(store: Path, name: str, dag: str, size: int, delay: int) -> None:
    models = ", ".join(f"{node}: {{url: noop.mar}}" for node in "abc")
    defaults = f"batch-size: {size}, max-batch-delay: {delay}"
    specification = store / f"{name}.yaml"
    specification.write_text(f"models: {{{defaults}, {models}}}\ndag: {dag}\n")
    generate_workflow_archive(
        WorkflowArchiverConfig(name, str(specification), export_path=str(store), force=True)
    )
