"""The words and the JSON schemas that the API descriptions are written with."""

from collections.abc import Iterable, Mapping
from typing import Any

from marserve.frontend.configuration.batching_values import BATCH_POLICIES

Json = dict[str, Any]

# The largest 32-bit integer: what TorchServe could read, and typed clients can hold.
_MOST = 2**31 - 1


def text(description: str, **more: Any) -> Json:
    """A string."""
    return {"type": "string", "description": description, **more}


def whole(description: str, **more: Any) -> Json:
    """A whole number."""
    return {"type": "integer", "description": description, **more}


def bounded(description: str, minimum: int, **more: Any) -> Json:
    """A whole number that typed clients can hold."""
    return whole(description, format="int32", minimum=minimum, maximum=_MOST, **more)


def number(description: str, **more: Any) -> Json:
    """A number, whole or not."""
    return {"type": "number", "description": description, **more}


def flag(description: str, **more: Any) -> Json:
    """A boolean."""
    return {"type": "boolean", "description": description, **more}


def listing(items: Json, description: str = "", **more: Any) -> Json:
    """A list."""
    about = {"description": description} if description else {}
    return {"type": "array", "items": items, **about, **more}


def record(optional: Iterable[str] = (), /, **members: Json) -> Json:
    """An object whose members are always there, but for those named as optional."""
    absent = set(optional)
    required = [name for name in members if name not in absent]
    return {"type": "object", **({"required": required} if required else {}), "properties": members}


def ref(schema: str) -> Json:
    """The schema of this name in `SCHEMAS`."""
    return {"$ref": f"#/components/schemas/{schema}"}


def content(schema: Json, media_type: str = "application/json") -> Json:
    """A body of a media type."""
    return {"content": {media_type: {"schema": schema}}}


ANYTHING: Json = {}
BYTES: Json = {"type": "string", "format": "binary"}
_POLICIES = list(BATCH_POLICIES)
_PARAMETERS: Json = {"type": "object", "description": "Whatever else the handler uses."}

SCHEMAS: Mapping[str, Json] = {
    "Error": record(
        ["message", "error"],
        code=whole("The HTTP status once more."),
        type=text("The kind of failure, a word that programs can rely on."),
        message=text("One sentence for people."),
        error=text("The same below /v2 while the Open Inference Protocol is on."),
    ),
    "Status": record(status=text("What was done, or how the server is.")),
    "Document": record(
        openapi=text("Version of OpenAPI."), info={"type": "object"}, paths={"type": "object"}
    ),
    "Live": record(live=flag("Whether the server runs.")),
    "Ready": record(ready=flag("Whether requests are answered.")),
    "Readiness": record(
        ["models"],
        status=text("Ready, Not ready or Stopping."),
        models=listing({"type": "string"}, "Models with fewer loaded workers than their minimum."),
    ),
    "ModelReady": record(name=text("Name of the model."), ready=flag("Whether it is ready.")),
    "ServerMetadata": record(
        ["extensions", "extenstion"],
        name=text("Name of the server."),
        version=text("Version of the server."),
        extensions=listing({"type": "string"}, "What is offered beyond the protocol."),
        extenstion=listing({"type": "string"}, "The same under the name that TorchServe gave it."),
    ),
    "ModelMetadata": record(
        name=text("Name of the model."),
        versions=listing({"type": "string"}, "The versions there are."),
        platform=text("Empty: the handler decides what runs the model."),
        inputs=listing({"type": "object"}, "Empty: the handler takes what it likes."),
        outputs=listing({"type": "object"}, "Empty: the handler gives what it likes."),
    ),
    "Instances": record(instances=listing(ANYTHING, "One element per prediction wanted.")),
    "InferenceRequest": record(
        ["id", "parameters", "outputs"],
        id=text("Comes back with the answer."),
        parameters=_PARAMETERS,
        inputs=listing(ref("InputTensor"), "The tensors to work on."),
        outputs=listing({"type": "object"}, "The tensors wanted back; all of them when left out."),
    ),
    "InputTensor": record(
        ["data", "parameters"],
        name=text("Name of the tensor."),
        shape=listing({"type": "integer"}, "Length of each dimension."),
        datatype=text("Type of the elements: BOOL, INT64, FP32, BYTES, …"),
        data=listing(ANYTHING, "The elements, row by row; absent if they are behind the JSON."),
        parameters={
            **_PARAMETERS,
            "properties": {"binary_data_size": whole("So many bytes behind the JSON.", minimum=0)},
        },
    ),
    "ModelList": record(
        ["nextPageToken"],
        nextPageToken=text("To be sent along for the next page; absent when this one is not full."),
        models=listing(ref("ListedModel"), "Sorted by name, at most `limit` of them."),
    ),
    "ListedModel": record(
        modelName=text("Name of the model."),
        modelUrl=text("Where its default version came from."),
    ),
    "Models": listing(
        {"anyOf": [ref("Model"), ref("FailedModel")]}, "One element per version.", minItems=1
    ),
    "FailedModel": record(
        modelName=text("Name of the model."),
        modelVersion=text("Version of the model; empty where it is not known."),
        modelUrl=text("Where the archive should have come from."),
        minWorkers=whole("No workers."),
        maxWorkers=whole("No workers."),
        loadedAtStartup=flag("It was not."),
        workers=listing(ref("Worker"), "There are none."),
        state=text("What became of it when the server started.", enum=["FAILED"]),
        lastError=text("Why it could not be loaded."),
    ),
    "Model": record(
        ["deviceIds", "customizedMetadata"],
        modelName=text("Name of the model."),
        modelVersion=text("Version of the model."),
        modelUrl=text("Where the archive came from."),
        runtime=text("What runs the handler, as the archive states it."),
        minWorkers=whole("Workers that are kept running."),
        maxWorkers=whole("Workers there may be at most."),
        batchSize=whole("Requests that are predicted together at most."),
        maxBatchDelay=whole("Milliseconds that a batch waits to be filled."),
        responseTimeout=whole("Seconds that a worker may take for a batch."),
        startupTimeout=whole("Seconds that a worker may take to load the model."),
        maxRetryTimeoutInSec=whole("Seconds during which a failing worker is started again."),
        clientTimeoutInMills=whole("Milliseconds after which a request expires; 0: never."),
        parallelType=text("How one worker spans devices: pp, tp, pptp or custom; else empty."),
        parallelLevel=whole("Processes that make up one worker."),
        deviceType=text("What the model runs on: cpu, gpu, …"),
        deviceIds=listing({"type": "integer"}, "Devices it is bound to; absent when to none."),
        continuousBatching=flag("Whether requests join a batch that is under way."),
        useJobTicket=flag("Whether requests are refused when no worker is idle."),
        useVenv=flag("Whether workers run in an environment of their own."),
        stateful=flag("Whether requests are batched by sequence."),
        sequenceMaxIdleMSec=whole("Milliseconds without a request that end a sequence."),
        sequenceTimeoutMSec=whole("Milliseconds after which a sequence ends."),
        maxNumSequence=whole("Sequences that are open at once at most."),
        maxSequenceJobQueueSize=whole("Requests of one sequence that may wait."),
        loadedAtStartup=flag("Whether a model of that name was loaded as the server started."),
        workers=listing(ref("Worker"), "Its workers."),
        jobQueueStatus=record(
            remainingCapacity=whole("Requests of normal priority that still find a place to wait."),
            pendingRequests=whole("Requests that wait."),
        ),
        customizedMetadata={"type": "object", "description": "What the handler says of itself."},
        batchPolicy=text("How requests become batches.", enum=_POLICIES),
        maxLatencyMs=whole("The latency goal; 0: none."),
        numRequests=whole("Requests that the clients keep in flight; 0: unknown."),
        compiledBatchSizes=listing({"type": "integer"}, "Sizes the model runs; empty: any."),
        jobQueueSize=whole("Places to wait, as configured."),
        batching=ref("Batching"),
    ),
    "Batching": record(
        ["why", "costs"],
        size=whole("Requests in a batch at most, now."),
        isAutomatic=flag("Whether that is found by measuring."),
        why=text("Why that size; absent where somebody has said so."),
        windowMs=number("Milliseconds that a batch waits to be filled at most."),
        queueBound=whole("Places to wait, now."),
        costs=ref("BatchCosts"),
    ),
    "BatchCosts": record(
        perRequestMs=number("Milliseconds per request, of the line through the costs."),
        perBatchMs=number("Milliseconds per batch, of the same line."),
        batches=whole("Batches learnt from; a size tried at load counts as several."),
        margin=number("Mean deviations that estimates lie above the mean."),
        points=listing(ref("BatchCost"), "By size, rising."),
    ),
    "BatchCost": record(
        size=number("Mean size of the batches."),
        meanMs=number("Milliseconds that they take."),
        boundMs=number("Milliseconds that they hardly exceed."),
        batches=whole("How many they were."),
    ),
    "BatchHistory": record(
        modelName=text("Name of the model."),
        modelVersion=text("Version of the model."),
        batches=listing(ref("PastBatch"), "The last 512 at most, the newest last."),
    ),
    "PastBatch": record(
        ["predictedMs"],
        closedAt=whole("When it left, in milliseconds since the epoch."),
        size=whole("Its requests."),
        ranAs=whole("Rows that were run; what is more than its requests was padding."),
        reason=text("Why it left then."),
        oldestWaitedMs=number("Milliseconds that its oldest request had waited."),
        heldMs=number("For how long of these it was held although a worker was idle."),
        predictedMs=number("Milliseconds it was expected to take; absent where that is unknown."),
        tookMs=number("Milliseconds it took, from its leaving to its answer."),
        succeeded=flag("Whether it was answered rather than failed as a whole."),
    ),
    "Worker": record(
        ["lastError", "lastErrorTime", "lastErrorStack", "lastErrorOutput"],
        id=text("Number of the worker."),
        startTime=text("Local time of its start, yyyy-MM-ddTHH:mm:ss.SSSZ."),
        status=text("READY once the model is loaded.", enum=["READY", "UNLOADING"]),
        memoryUsage=whole("Bytes of resident memory; 0 while unknown."),
        pid=whole("Id of its process; -1 while there is none."),
        gpu=flag("Whether it runs on a GPU."),
        gpuUsage=text("Load and memory of its GPU; N/A without one."),
        state=text(
            "Where it is in its life; FAILED also while it waits for another try.",
            enum=["STARTING", "LOADING", "READY", "FAILED"],
        ),
        lastError=text("Why it failed last; absent if it never did, or has done well since."),
        lastErrorTime=text("Local time of that, yyyy-MM-ddTHH:mm:ss.SSSZ."),
        lastErrorStack=listing(text("A line."), "The Python stacks of its threads at that moment."),
        lastErrorOutput=listing(text("A line."), "The last lines it printed before."),
    ),
}
