"""The data of the dashboard: an overview of all models each second, and details of one.

Documents are made only while somebody watches, once for all watchers.
"""

import asyncio
import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import psutil

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.batches import Batch
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import ServerBusy
from marserve.frontend.operations.describe import describe_batching
from marserve.frontend.operations.problems import model_problems, server_problems
from marserve.frontend.operations.traffic import Traffic, TrafficHistory
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.telemetry.gpu import Gpu, GpuReader
from marserve.frontend.version import __version__
from marserve.frontend.workers.supervisor import WorkerSupervisor
from marserve.frontend.workflows.workflow import WorkflowRegistry

_PERIOD_SECONDS = 1.0
# A watcher that reads too slowly is disconnected; its page connects again.
_MAX_BACKLOG_BYTES = 4 << 20
_MAX_WATCHERS = 100
_EVENTS = {"content-type": "text/event-stream"}


@dataclass(eq=False)
class _Watcher:
    stream: Stream
    model: ModelVersion | None
    last: Batch | None = None  # the last batch that it has received


@dataclass(eq=False)
class Dashboard:
    """The watchers of a server."""

    registry: ModelRegistry
    workflows: WorkflowRegistry
    gpus: GpuReader
    inference_address: str = ""
    traffic: TrafficHistory = field(init=False)

    def __post_init__(self) -> None:
        self.traffic = TrafficHistory(self.registry)
        self._started_at = time.time()
        self._watchers: set[_Watcher] = set()
        self._is_watched = asyncio.Event()
        self._is_closed = False
        self._processors = _Processors()
        #: By process id, since the last event: its processor seconds, and when they were read.
        self._processes: dict[int, tuple[float, float]] = {}

    async def run(self) -> None:
        """Send events to the watchers until cancelled."""
        while True:
            await self._is_watched.wait()  # without a deadline: for the first watcher
            await asyncio.sleep(_PERIOD_SECONDS)
            gpus = await self._read_gpus()
            overview = _event("overview", self._overview(gpus))
            models, processes = set(self.registry), dict[int, dict[str, Any]]()
            for watcher in list(self._watchers):
                if watcher.model is not None and watcher.model not in models:
                    watcher.stream.end()  # it was unregistered; the page connects again
                else:
                    watcher.stream.push(overview + self._details(watcher, processes))
            self._processes = {pid: self._processes[pid] for pid in processes}

    async def watch(self, model: ModelVersion | None) -> Stream:
        """Return a stream of server-sent events, with details of a model if one is given.

        Raises:
            ServerBusy: There are too many watchers, or the server stops.
        """
        if self._is_closed or len(self._watchers) >= _MAX_WATCHERS:
            raise ServerBusy(f"{_MAX_WATCHERS} pages receive events already, or the server stops.")
        gpus = await self._read_gpus()
        watcher = _Watcher(Stream(Prediction(b"", headers=_EVENTS)), model)
        stream = watcher.stream
        stream.max_waiting_bytes = _MAX_BACKLOG_BYTES
        stream.push(_event("overview", self._overview(gpus)) + self._details(watcher, {}))
        self._watchers.add(watcher)
        stream.on_close = lambda _complete, _broken: self._left(watcher)
        self._is_watched.set()
        return stream

    def close(self) -> None:
        """End all streams, and accept no more."""
        self._is_closed = True
        for watcher in list(self._watchers):
            watcher.stream.end()

    def _left(self, watcher: _Watcher) -> None:
        self._watchers.discard(watcher)
        if not self._watchers:
            self._is_watched.clear()
            self._processes.clear()

    async def _read_gpus(self) -> Sequence[Gpu]:
        has_gpus = any(worker.gpu_id is not None for m in self.registry for worker in m.workers)
        return await self.gpus.read() if has_gpus else ()

    def _overview(self, gpus: Sequence[Gpu]) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        traffic = {model: self.traffic.of(model) for model in self.registry}
        problems = chain(
            server_problems(self.registry),
            *(model_problems(model, each) for model, each in traffic.items()),
        )
        defaults = set(self.registry.defaults())
        return {
            "at": round(time.time() * 1000),
            "server": {
                "version": __version__,
                "hostname": socket.gethostname(),
                "pid": os.getpid(),
                "startedAt": round(self._started_at * 1000),
                "inferenceAddress": self.inference_address,
            },
            "host": {
                "cpus": psutil.cpu_count(),
                "cpuPercent": self._processors.percent(),
                "memoryUsedBytes": memory.total - memory.available,
                "memoryTotalBytes": memory.total,
                "gpus": [
                    {
                        "id": number,
                        "utilizationPercent": gpu.utilization,
                        "memoryUsedMiB": gpu.memory_used,
                        "memoryTotalMiB": gpu.memory_total,
                    }
                    for number, gpu in enumerate(gpus)
                ],
            },
            "problems": [problem.document() for problem in problems],
            "models": [
                _describe_model(model, each, is_default=model in defaults)
                for model, each in traffic.items()
            ],
        }

    def _details(self, watcher: _Watcher, processes: dict[int, dict[str, Any]]) -> bytes:
        """Return the event of the watcher's model; ``processes`` are those described already."""
        model = watcher.model
        if model is None:
            return b""
        history = model.batcher.history
        batches = history.as_documents(after=watcher.last)
        watcher.last = next(reversed(history), None)
        epoch = time.time() - time.monotonic()
        workflow = model.origin.workflow
        return _event(
            "model",
            {
                "modelName": model.name,
                "modelVersion": model.version,
                "batches": batches,
                "batching": describe_batching(model),
                "workers": [
                    {
                        **_describe_worker(model, worker, epoch),
                        **self._describe_process(worker.pid, processes),
                    }
                    for worker in model.workers
                ],
                "sequences": _describe_sequences(model),
                "scaling": [
                    {"at": round((epoch + at) * 1000), "workers": workers, "why": why}
                    for at, workers, why in model.workers.history.scalings
                ],
                "workflow": {
                    "name": workflow,
                    "runs": [run.document() for run in self.workflows.find(workflow).timeline],
                }
                if workflow in self.workflows
                else None,
            },
        )

    def _describe_process(
        self, pid: int | None, described: dict[int, dict[str, Any]]
    ) -> dict[str, Any]:
        if pid is None:
            return {"processStatus": None, "cpuPercent": None, "memoryBytes": None}
        if pid in described:
            return described[pid]
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                status, memory = process.status(), process.memory_info().rss
                seconds, now = sum(process.cpu_times()[:2]), time.monotonic()
        except psutil.Error:  # it has just ended
            return self._describe_process(None, described)
        before, at = self._processes.get(pid, (seconds, now))
        percent = 100 * (seconds - before) / (now - at) if now > at else 0.0
        self._processes[pid] = seconds, now
        described[pid] = {
            "processStatus": status,
            "cpuPercent": round(percent, 1),
            "memoryBytes": memory,
        }
        return described[pid]


class _Processors:
    """The use of the host's processors; ``psutil.cpu_percent`` would share a state with others."""

    def __init__(self) -> None:
        self._before = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        times = psutil.cpu_times()
        return sum(times[:8]), times.idle + getattr(times, "iowait", 0.0)

    def percent(self) -> float:
        """Return the percentage since the last call."""
        now = self._read()
        total, idle = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        return round(100 * (1 - idle / total), 1) if total > 0 else 0.0


def _event(name: str, document: dict[str, Any]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(document, separators=(',', ':'))}\n\n".encode()


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


def _describe_worker(model: ModelVersion, worker: WorkerSupervisor, epoch: float) -> dict[str, Any]:
    failure = worker.last_failure
    return {
        "id": worker.worker_id,
        "state": worker.state.value,
        "pid": worker.pid,
        "gpuId": worker.gpu_id,
        "startedAt": round(worker.started_at * 1000),
        "lastError": failure.reason if failure else None,
        "events": [
            {"at": round((epoch + at) * 1000), "state": state, "error": error or None}
            for at, _, state, error in model.workers.history.of(worker.worker_id)
        ],
    }


def _describe_sequences(model: ModelVersion) -> dict[str, int] | None:
    if not isinstance(model, StatefulModelVersion):
        return None
    return {"open": model.sequences.open, "waiting": model.sequences.waiting}
