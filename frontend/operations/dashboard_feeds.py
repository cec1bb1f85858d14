"""What the pages of the dashboard show: an overview of all models, and details of one.

A feed is made once for all its watchers, in steps. It has the members as the watchers have them, as
JSON; an event has the members that have changed, and the new items of lists that grow.
"""

import json
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Reversible, Sequence
from itertools import takewhile
from typing import Any, TypeVar

from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.batches import Batch
from marserve.frontend.measurements import (
    ProcessorLoad,
    machine_memory,
    process_use,
    processor_count,
)
from marserve.frontend.operations.describe import describe_batching
from marserve.frontend.operations.problems import crash_loop, model_problems, server_problems
from marserve.frontend.operations.traffic import Traffic, TrafficHistory
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.telemetry.gpu import Gpu
from marserve.frontend.version import __version__
from marserve.frontend.workflows.timeline import RunTimes
from marserve.frontend.workflows.workflow import WorkflowRegistry

T = TypeVar("T")

# The items of lists that grow, as many as a page shows.
_MAX_BATCHES = 512
_MAX_RUNS = 20
_json = json.JSONEncoder(separators=(",", ":")).encode


class _Members:
    """Members by name, as JSON."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def take(self, texts: dict[str, str]) -> dict[str, str]:
        """Replace all members; return those that differ."""
        changed = {name: text for name, text in texts.items() if self.texts.get(name) != text}
        self.texts = texts
        return changed


class Overview:
    """The feed of the server, its host and all models."""

    def __init__(self, registry: ModelRegistry, inference_address: str) -> None:
        self.traffic = TrafficHistory(registry)
        self._registry = registry
        self._members, self._models = _Members(), _Members()
        self._processors = ProcessorLoad()
        self._server = {
            "version": __version__,
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "startedAt": round(time.time() * 1000),
            "inferenceAddress": inference_address,
        }

    def whole(self) -> bytes:
        """Return the event for a new watcher."""
        return _event(
            "overview", {**self._members.texts, "models": _list(self._models.texts.values())}
        )

    def update(self, gpus: Sequence[Gpu]) -> Steps[bytes]:
        """Look at the server; return the event for the others.

        ``models`` are those that have changed; ``gone`` has names and versions.
        """
        defaults = set(self._registry.defaults())
        problems, models = list(server_problems(self._registry)), dict[str, str]()
        for model in list(self._registry):
            traffic = self.traffic.of(model)
            problems += model_problems(model, traffic)
            document = _describe_model(model, traffic, is_default=model in defaults)
            models[_json([model.name, model.version])] = _json(document)
            yield 0
        gone = self._models.texts.keys() - models.keys()
        changed = self._members.take(
            {
                "at": str(round(time.time() * 1000)),
                "server": _json(self._server),
                "host": _json(self._describe_host(gpus)),
                "problems": _json([problem.document() for problem in problems]),
            }
        )
        changed["models"] = _list(self._models.take(models).values())
        return _event("overview", {**changed, "gone": _list(gone)})

    def _describe_host(self, gpus: Sequence[Gpu]) -> dict[str, Any]:
        memory = machine_memory()
        return {
            "cpus": processor_count(),
            "cpuPercent": self._processors.percent(),
            "memoryUsedBytes": memory and memory.total - memory.available,
            "memoryTotalBytes": memory and memory.total,
            "gpus": [
                {
                    "id": number,
                    "utilizationPercent": gpu.utilization,
                    "memoryUsedMiB": gpu.memory_used,
                    "memoryTotalMiB": gpu.memory_total,
                }
                for number, gpu in enumerate(gpus)
            ],
        }


class Details:
    """The feed of a model; its lists that grow are the batches, and the runs of its workflow."""

    def __init__(self, model: ModelVersion, workflows: WorkflowRegistry) -> None:
        self._model, self._workflows = model, workflows
        self._members = _Members()
        self._batches: deque[Batch] = deque(maxlen=_MAX_BATCHES)
        self._runs: deque[RunTimes] = deque(maxlen=_MAX_RUNS)
        self._epoch = time.time() - time.monotonic()  # the same for all events
        #: By process id: its processor seconds, and when they were read.
        self._processes: dict[int, tuple[float, float]] = {}

    def whole(self) -> Steps[bytes]:
        """Return the event for a new watcher."""
        lists = yield from self._lists(self._batches, self._runs)
        return _event("model", {**self._members.texts, **lists})

    def update(self) -> Steps[bytes]:
        """Look at the model; return the event for the other watchers."""
        model, name = self._model, self._model.origin.workflow
        workflow = self._workflows.find(name) if name in self._workflows else None
        batches = _after(model.batcher.history, self._batches)
        runs = _after(workflow.timeline, self._runs) if workflow is not None else []
        self._batches.extend(batches)
        self._runs.extend(runs)
        lists = yield from self._lists(batches, runs)
        members = {
            "modelName": model.name,
            "modelVersion": model.version,
            "batching": describe_batching(model),
            "workers": self._describe_workers(),
            "processes": (yield from self._describe_processes()),
            "sequences": _describe_sequences(model),
            "scaling": [
                {"at": self._ms(at), "workers": workers, "why": why}
                for at, workers, why in model.workers.history.scalings
            ],
            "workflow": None if workflow is None else name,
        }
        changed = self._members.take({key: _json(value) for key, value in members.items()})
        return _event("model", {**changed, **lists})

    def _lists(self, batches: Iterable[Batch], runs: Iterable[RunTimes]) -> Steps[dict[str, str]]:
        found: dict[str, list[str]] = {"batches": [], "runs": []}
        for document in self._model.batcher.history.documents(batches):
            found["batches"].append(_json(document))
            yield 0
        for run in runs:
            found["runs"].append(_json(run.document()))
            yield 0
        return {name: _list(texts) for name, texts in found.items()}

    def _describe_workers(self) -> list[dict[str, Any]]:
        events = defaultdict[int, list[dict[str, Any]]](list)
        for change in self._model.workers.history.changes():
            event = {
                "at": self._ms(change.at),
                "state": change.state,
                "error": change.error or None,
            }
            events[change.worker_id].append(event)
        return [
            {
                "id": worker.worker_id,
                "state": worker.state.value,
                "pid": worker.pid,
                "gpuId": worker.gpu_id,
                "startedAt": round(worker.started_at * 1000),
                "lastError": (failure := worker.last_failure) and failure.reason,
                "lastErrorAt": failure and round(failure.moment * 1000),
                "events": events[worker.worker_id],
            }
            for worker in self._model.workers
        ]

    def _describe_processes(self) -> Steps[dict[str, dict[str, Any]]]:
        """Return the use of the host by the processes of the workers, by their ids."""
        before, self._processes = self._processes, {}
        found = dict[str, dict[str, Any]]()
        for worker in list(self._model.workers):
            if worker.pid is None:
                continue
            if use := process_use(worker.pid):
                last, at = before.get(worker.pid, (use.seconds, use.at))
                passed = use.at - at
                percent = 100 * (use.seconds - last) / passed if passed > 0 else 0.0
                self._processes[worker.pid] = use.seconds, use.at
                found[str(worker.worker_id)] = {
                    "processStatus": use.status,
                    "cpuPercent": round(percent, 1),
                    "memoryBytes": use.resident,
                }
            yield 0
        return found

    def _ms(self, moment: float) -> int:
        return round((self._epoch + moment) * 1000)


def _after(items: Reversible[T], known: Sequence[T]) -> list[T]:
    """Return the items that have been added since the last known one."""
    last = known[-1] if known else None
    return list(takewhile(lambda item: item is not last, reversed(items)))[::-1]


def _list(texts: Iterable[str]) -> str:
    return f"[{','.join(texts)}]"


def _event(name: str, members: Mapping[str, str]) -> bytes:
    text = ",".join(f'"{name}":{value}' for name, value in members.items())
    return f"event: {name}\ndata: {{{text}}}\n\n".encode()


def _describe_model(model: ModelVersion, traffic: Traffic, *, is_default: bool) -> dict[str, Any]:
    workers, goal = model.workers, model.settings.batching.goal
    given_up = sum(worker.is_stopped for worker in workers)
    p50, p95, p99 = [round(each * 1000, 3) for each in traffic.percentiles] or (None,) * 3
    return {
        "modelName": model.name,
        "modelVersion": model.version,
        "isDefault": is_default,
        "workers": {
            "ready": workers.ready,
            "min": workers.min_workers,
            "max": workers.max_workers,
            "restarting": len(workers) - workers.ready - given_up,
            "givenUp": given_up,
            "crashLoop": crash_loop(model),
        },
        "queued": model.queued,
        "queueBound": model.queued + model.free_capacity,
        "open": model.pending,
        "batchSize": model.batcher.size,
        "requestsPerSecond": round(traffic.per_second, 2),
        "latencyMs": None if p50 is None else {"p50": p50, "p95": p95, "p99": p99},
        "goalMs": round(goal * 1000, 3) if goal < float("inf") else None,
        "errors": {reason: count for reason, count in traffic.errors.items() if count},
        "history": traffic.rates,
    }


def _describe_sequences(model: ModelVersion) -> dict[str, int] | None:
    if not isinstance(model, StatefulModelVersion):
        return None
    return {"open": model.sequences.open, "waiting": model.sequences.waiting}
