"""What the management listener offers, row by row."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from marserve.frontend.configuration.batching_values import BATCH_POLICIES
from marserve.frontend.rest.openapi_operations import (
    DOCUMENT,
    METRICS,
    OLD_DOCUMENT,
    Answers,
    Operation,
    and_by_version,
    answers,
    errors,
    json_of,
    query_parameter,
)
from marserve.frontend.rest.openapi_schemas import (
    ANYTHING,
    Json,
    bounded,
    content,
    flag,
    record,
    text,
    whole,
)

_UPDATED: Answers = {
    202: json_of("Taken on; the workers follow.", "Status"),
    206: json_of("Done in part: not all workers run yet.", "Status"),
}
_SYNCHRONOUS = "Whether to answer only when the workers run."
_SIZE: Json = {
    "description": "Requests predicted together; `auto` finds it by measuring.",
    "anyOf": [bounded("A number.", 1), text("By measuring.", enum=["auto"])],
}
_BATCHING: Mapping[str, Json] = {
    "max_batch_size": {**_SIZE, "description": "The same as `batch_size`."},
    "batch_policy": text("How requests become batches.", enum=list(BATCH_POLICIES)),
    "max_latency_ms": bounded("The latency goal; 0: none. Makes the policy adaptive.", 0),
    "num_requests": bounded("Requests that the clients keep in flight; 0: unknown.", 0),
    "compiled_batch_sizes": text("Sizes the model runs, as `1,4,8`; empty: any."),
    "job_queue_size": bounded("Places to wait.", 1),
}
# Defaults below the smallest useful value are TorchServe's marks for "as configured".
_REGISTER_PARAMETERS: Mapping[str, Json] = {
    "url": text("The archive: a name in the model store, a path, or an allowed URL."),
    "model_name": text("Name to serve it under; else the archive's."),
    "handler": text("Handler to use instead of the archive's."),
    "runtime": text("What runs the handler.", enum=["python", "python3", "LSP"]),
    "batch_size": bounded(
        "Requests predicted together; `auto`, which is no number, finds it by measuring; -1: "
        "as configured.",
        -1,
        default=-1,
    ),
    "max_batch_delay": bounded(
        "Milliseconds a batch waits to be filled; -1, -100: as configured.", -100, default=-100
    ),
    **_BATCHING,
    "initial_workers": bounded("Workers to start with; else as configured.", 0),
    "synchronous": flag(_SYNCHRONOUS, default=True),
    "response_timeout": bounded(
        "Seconds a worker may take for a batch; -1: as configured.", -1, default=-1
    ),
    "startup_timeout": bounded(
        "Seconds a worker may take to load the model; -1: as configured.", -1, default=-1
    ),
    "s3_sse_kms": flag("Whether the archive lies in S3, encrypted by KMS.", default=False),
}
_REGISTER_BODY: Json = {
    "description": "The same parameters; the query is then not looked at.",
    **content(record([*_REGISTER_PARAMETERS.keys() - {"url"}], **_REGISTER_PARAMETERS)),
}


def _managing(route: str, name: str, summary: str, answered: Answers, *query: Json) -> Operation:
    guarded = {**answered, **errors(400, 403)}  # a token, or else no web page from elsewhere
    return Operation(route, name, summary, guarded, "management", query)


def _ignored(name: str) -> Json:
    return query_parameter(name, text("Of no effect, allowed for old clients."), deprecated=True)


_DESCRIBE = _managing(
    "get /models/{model_name}",
    "describeModel",
    "Describe a model.",
    {
        **answers("Models", 404, 500, 503, 504, 507),
        "default": json_of("A failure of the handler that was asked for its own words.", "Error"),
    },
    query_parameter(
        "customized", flag("Whether to ask the handler for its own words.", default=False)
    ),
)
_SCALE = _managing(
    "put /models/{model_name}",
    "setAutoScale",
    "Set how many workers a model has, or how its requests become batches.",
    {**answers("Status", 404, 500, 503, 507), **_UPDATED},
    query_parameter(
        "min_worker", bounded("Workers to keep running; 0 ends them all.", 0, default=1)
    ),
    query_parameter("max_worker", bounded("Workers there may be; `min_worker` if left out.", 0)),
    query_parameter("model_version", text("Version to scale; the default one if left out.")),
    query_parameter("synchronous", flag(_SYNCHRONOUS, default=False)),
    query_parameter("batch_size", _SIZE),
    query_parameter("max_batch_delay", bounded("Milliseconds a batch waits; 0: does not.", 0)),
    *(query_parameter(name, schema) for name, schema in _BATCHING.items()),
    _ignored("number_gpu"),
    _ignored("timeout"),
)
_UNREGISTER = _managing(
    "delete /models/{model_name}",
    "unregisterModel",
    "Unregister a model, and end its workers.",
    answers("Status", 404, 405, 500, 503),
    _ignored("synchronous"),
    _ignored("timeout"),
)
_BATCHES = _managing(
    "get /models/{model_name}/batches",
    "listBatches",
    "Show the last batches of a model, and why each left when it did.",
    answers("BatchHistory", 404, 405),
)
ONE_MODEL: Sequence[Operation] = [
    *and_by_version(_DESCRIBE),
    *and_by_version(_SCALE),
    *and_by_version(_UNREGISTER),
    _managing(
        "put /models/{model_name}/{model_version}/set-default",
        "setDefault",
        "Make a version the one that is meant when none is named.",
        answers("Status", 404),
    ),
    _BATCHES,
    replace(
        _BATCHES,
        route="get /models/{model_name}/{model_version}/batches",
        name="version_listBatches",
    ),
]
_LIST = _managing(
    "get /models",
    "listModels",
    "List the models.",
    answers("ModelList"),
    query_parameter("limit", whole("Models on a page.", default=100, minimum=0, maximum=100)),
    query_parameter(
        "next_page_token", bounded("Models to leave out: `nextPageToken`.", 0, default=0)
    ),
)
_REGISTER = _managing(
    "post /models",
    "registerModel",
    "Register a model, and start workers for it.",
    {**answers("Status", 404, 405, 408, 409, 413, 500, 503, 507), **_UPDATED},
    *(
        query_parameter(name, schema, required=name == "url")
        for name, schema in _REGISTER_PARAMETERS.items()
    ),
)
_RENEW = Operation(
    "get /token",
    "renewToken",
    "Renew a key; the new one is in the key file.",
    {200: {"description": "An empty line.", **content(ANYTHING)}, **errors(400, 404)},
    "api",
    [query_parameter("type", text("The key.", enum=["management", "inference"]), required=True)],
)
MANAGEMENT: Sequence[Operation] = [
    DOCUMENT,
    _LIST,
    replace(_REGISTER, body=_REGISTER_BODY),
    *ONE_MODEL,
    OLD_DOCUMENT,
    METRICS,
    _managing(
        "get /v1/models/{model_name}",
        "kserveV1Ready",
        "Ask whether a model has workers.",
        answers("ModelReady", 404),
    ),
    _RENEW,
]
