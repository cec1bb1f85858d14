"""Builds the description of a model version: TorchServe's members in its order, then ours."""

import datetime as dt
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from marserve.backend.protocol import Input
from marserve.frontend.aio.json_items import SMALL_BYTES, UNREADABLE, Text, check_json, text_of
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.isolation.failure_isolation import FailureIsolation
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.batching.learning.latency_model import BOUND_SHARE, LatencyModel
from marserve.frontend.batching.lengths.length_grouping import LengthGrouping
from marserve.frontend.configuration.model_entry import TORCHSERVES
from marserve.frontend.configuration.model_schema import SETTINGS
from marserve.frontend.documents import JsonText
from marserve.frontend.errors import ServeError
from marserve.frontend.measurements import resident_bytes
from marserve.frontend.operations.problems import crash_loop
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.predict_request import PredictRequest, RequestOptions
from marserve.frontend.serving.registry import FailedLoad
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.gpu import Gpu
from marserve.frontend.workers.failures import Failure
from marserve.frontend.workers.supervisor import WorkerSupervisor

# In TorchServe's order.
_TORCHSERVES = (
    *TORCHSERVES,
    "maxRetryTimeoutInSec",
    "clientTimeoutInMills",
    "parallelType",
    "parallelLevel",
    "deviceType",
    "deviceIds",
    "continuousBatching",
    "useJobTicket",
    "useVenv",
)
_OF_ROWS = ("batchDim", "stackInputs")
_WORKERS = ("minWorkers", "maxWorkers")  # each change sets both
#: The settings in a description: TorchServe's, those that a request can set, and those of rows.
DESCRIBED = tuple(
    row for row in SETTINGS if row.key in (*_TORCHSERVES, *_OF_ROWS) or "request" in row.sources
)


def describe(model: ModelVersion, gpus: Sequence[Gpu], customized: Any = None) -> dict[str, Any]:
    """Return a model version as JSON values, with its handler's own description ``customized``."""
    settings, batching, workers = model.settings, model.settings.batching, model.workers
    resolved = settings.values  # makes a dictionary
    values = {row.key: row.write(resolved) for row in DESCRIBED}
    has_rows = batching.splits_lists or settings.stack_inputs
    values |= {
        "minWorkers": workers.min_workers,
        "maxWorkers": workers.max_workers,
        "batchSize": model.batcher.size if batching.is_automatic else batching.size,
        "parallelType": settings.parallel.type if settings.parallel else "",
        "parallelLevel": settings.parallel.level if settings.parallel else 0,
        "deviceType": model.device_type,
        "batchDim": values["batchDim"] if has_rows else None,
        "stackInputs": settings.stack_inputs or None,
        "jobQueueSize": None if batching.goal_bounds_queue else batching.queue_size,
        "outstandingBatches": settings.outstanding_batches or workers.max_outstanding,
    }
    return {
        "modelName": model.name,
        "modelVersion": model.version,
        "modelUrl": None if model.origin.is_function else model.archive.url,
        "runtime": model.manifest.runtime,
        **{key: values.pop(key) for key in _TORCHSERVES},
        **_describe_limits(settings),
        "loadedAtStartup": model.origin.at_start,
        "workers": [_describe_worker(worker, gpus) for worker in workers],
        "jobQueueStatus": {
            "remainingCapacity": model.free_capacity,
            "pendingRequests": model.queued,
        },
        "customizedMetadata": customized,
        **values,
        "workflow": model.origin.workflow or None,
        "handler": model.manifest.handler,
        "s3SseKms": model.origin.s3_sse_kms,
        "decidedBy": _describe_origins(model),
        "crashLoop": crash_loop(model) or None,
        **({"warnings": model.warnings} if model.warnings else {}),
        "batching": describe_batching(model),
        **_describe_sequences(model),
    }


def describe_failed(load: FailedLoad) -> dict[str, Any]:
    """Return the description of a model that could not be loaded at the start."""
    return {
        "modelName": load.name,
        "modelVersion": load.version,
        "modelUrl": load.url,
        "minWorkers": 0,
        "maxWorkers": 0,
        "loadedAtStartup": False,
        "workers": [],
        "state": "FAILED",
        "lastError": load.reason,
    }


def _describe_origins(model: ModelVersion) -> dict[str, str]:
    """The source of each setting that is not the server's own default, except of the workers."""
    origins, origin = model.settings.origins, model.origin
    named = {"handler": origin.handler, "runtime": origin.runtime, "s3SseKms": origin.s3_sse_kms}
    return {
        **{key: origin.source for key, value in named.items() if value},
        **{
            row.key: origins[row.name]
            for row in SETTINGS
            if row.name in origins and row.key not in _WORKERS
        },
    }


def _describe_limits(settings: ModelSettings) -> dict[str, Any]:
    """TorchServe's members about sequences; 0 for a model that is not stateful."""
    limits = settings.sequence_limits if settings.stateful else None
    return {
        "stateful": settings.stateful,
        "sequenceMaxIdleMSec": round(settings.sequence_max_idle * 1000) if limits else 0,
        "sequenceTimeoutMSec": round(settings.sequence_timeout * 1000) if limits else 0,
        "maxNumSequence": limits.max_sequences if limits else 0,
        "maxSequenceJobQueueSize": limits.max_queue if limits else 0,
    }


def _describe_sequences(model: ModelVersion) -> dict[str, Any]:
    if not isinstance(model, StatefulModelVersion):
        return {}
    table, workers = model.sequences, model.workers
    return {
        "sequences": {
            "open": table.open,
            "waiting": table.waiting,
            "slotsPerWorker": table.slots_per_worker,
            "ended": {reason.value: count for reason, count in table.ended.items()},
            "openByWorker": {
                str(worker.worker_id): workers.sequences_of(worker) for worker in workers
            },
        }
    }


def describe_batching(model: ModelVersion) -> dict[str, Any]:
    """Return what is set and learnt about the batches of a model, as JSON values."""
    batching, batcher, workers = model.settings.batching, model.batcher, model.workers
    lengths = batcher.learning.lengths
    return {
        "size": batcher.size,
        "isAutomatic": batching.is_automatic,
        "why": batcher.learning.why or None,
        "exploring": batcher.learning.exploration.size or None,
        "profiling": list(workers.idle_profiling.pending) or None,
        "windowMs": _ms(batching.delay),
        "queueBound": model.queue.capacity,
        "rowsOfLongLists": model.admission.unqueued_rows or None,
        "optimalNumberOfRequests": model.optimal_requests,
        "validation": _describe_validation(workers.validation.found),
        "failures": _describe_failures(batcher.isolation),
        "costs": _describe_costs(batcher.costs) if batcher.costs.is_known else None,
        **({"lengths": _describe_lengths(lengths)} if lengths else {}),
    }


def _describe_lengths(lengths: LengthGrouping) -> dict[str, Any]:
    learnt, relation = lengths.learnt, lengths.relation
    return {
        "isActive": lengths.is_active,
        "why": lengths.why,
        "explained": round(learnt.explained, 3) if learnt.is_known else None,
        "typicalLongest": round(learnt.typical, 3),
        "paddingShare": round(lengths.padding, 3),
        "inputLength": (
            {
                "isUsed": relation.is_used,
                "why": relation.why,
                "explained": round(relation.explained, 3),
                "inputs": relation.pairs,
                "failures": relation.failures,
            }
            if relation.pairs or relation.failures
            else None
        ),
    }


def _describe_validation(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """None without a comparison of batches with single requests."""
    if not found:
        return None
    return {
        "sizes": found["sizes"],
        "samples": found["samples"],
        "maxDifference": found["largest"],
        "tolerance": found["tolerance"],
        "failure": found["failure"] or None,
    }


def _describe_failures(isolation: FailureIsolation) -> dict[str, Any]:
    return {
        "share": round(isolation.rate.share, 3),
        "remembered": len(isolation.contents),
        "failsForAll": isolation.rate.fails_for_all,
    }


def _describe_costs(costs: LatencyModel) -> dict[str, Any]:
    per_request, per_batch = costs.line()
    return {
        "perRequestMs": _ms(per_request),
        "perBatchMs": _ms(per_batch),
        "batches": costs.samples,
        "realByExpected": {
            name: round(costs.distribution.quantile(share), 3)
            for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p97", BOUND_SHARE))
        },
        "points": [
            {
                "size": round(point.size, 2),
                "meanMs": _ms(costs.mean(round(point.size))),
                "boundMs": _ms(costs.bound(round(point.size))),
                "batches": point.batches,
            }
            for point in costs.points
        ],
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


async def customized_metadata(model: ModelVersion, input_: Input, memory: RequestMemory) -> Any:
    """Return the handler's own description of its model; an empty one if it is not a JSON object.

    The handler gets the headers of ``input_``. Raises ServeError if no worker is ready, or the
    handler failed.
    """
    # A worker of asynchronous handlers may have no deadline.
    options = RequestOptions(timeout=model.settings.response_timeout)
    input_.parts = []
    request = PredictRequest(input_, memory, time.monotonic(), False, options, True)
    answer = await model.predict(request)
    if isinstance(answer, Stream):  # not a description
        answer.close()
        return {}
    if answer.status != 200:
        raise ServeError("The handler could not describe its model.", status=answer.status)
    try:
        return await memory.run(_object_in(text_of(answer.body)))
    except UNREADABLE:
        return {}


def _object_in(body: Text) -> Steps[Any]:
    """Return the JSON object in a text; one of `UNREADABLE` is raised for malformed JSON."""
    if len(body) <= SMALL_BYTES:
        document = json.loads(body)
        return document if isinstance(document, dict) else {}
    yield len(body)
    start, stop = yield from check_json(body)
    return JsonText(body[start:stop].decode()) if body[start : start + 1] == b"{" else {}


def _describe_worker(worker: WorkerSupervisor, gpus: Sequence[Gpu]) -> dict[str, Any]:
    failure = worker.last_failure
    return {
        "id": str(worker.worker_id),
        "startTime": _local_time(worker.started_at),
        "status": "READY" if worker.is_ready else "UNLOADING",
        "memoryUsage": _resident_bytes(worker.pid),
        "pid": -1 if worker.pid is None else worker.pid,
        "gpu": worker.gpu_id is not None,
        "gpuUsage": gpu_usage(worker.gpu_id, gpus),
        # TorchServe reports every state but READY as "UNLOADING".
        "state": "FAILED" if worker.is_stopped else worker.state.name,
        **({"compiled": worker.results.compiled} if worker.results.compiled else {}),
        "torch": _describe_torch(worker),
        **(_describe_failure(failure) if failure else {}),
    }


def _describe_torch(worker: WorkerSupervisor) -> dict[str, Any]:
    options, (threads, note) = worker.threads.options, worker.threads.in_use
    if not note and options.threads and threads not in (0, options.threads):
        note = f"set by the handler; {options.threads}, {options.threads_why}, were given"
    return {
        "threads": threads or None,  # None until the worker has loaded torch or its model
        "threadsWhy": note or options.threads_why,
        "waitPolicy": options.wait_policy or None,
        "waitPolicyWhy": options.wait_why,
    }


def _describe_failure(failure: Failure) -> dict[str, Any]:
    return {
        "lastError": failure.reason,
        "lastErrorTime": _local_time(failure.moment),
        "lastErrorStack": failure.diagnostics.stack or None,
        "lastErrorOutput": failure.diagnostics.output or None,
    }


def gpu_usage(gpu_id: int | None, gpus: Sequence[Gpu]) -> str:
    """Return the usage of a worker's GPU in TorchServe's format, which is that of nvidia-smi."""
    if gpu_id is None:
        return "N/A"
    if gpu_id >= len(gpus):
        return "failed to obtained gpu usage"  # clients compare the text
    gpu = gpus[gpu_id]
    figures = {
        "utilization.gpu": (gpu.utilization, "%"),
        "utilization.memory": (gpu.memory_traffic, "%"),
        "memory.used": (gpu.memory_used, "MiB"),
    }
    texts = [
        f"{name}::{'[N/A]' if value is None else f'{value} {unit}'}"
        for name, (value, unit) in figures.items()
    ]
    return " ".join([f"gpuId::{gpu_id}", *texts])


def _resident_bytes(pid: int | None) -> int:
    # 0 for unknown, as in TorchServe: its clients read a number.
    return (pid is not None and resident_bytes(pid)) or 0


def _local_time(epoch: float) -> str:
    # Local time with a literal Z, as TorchServe prints it and clients parse it.
    return f"{dt.datetime.fromtimestamp(epoch).isoformat(timespec='milliseconds')}Z"  # noqa: DTZ006
