"""What the doors offer, as OpenAPI 3.0 documents: one per listener, and two per model.

An `_Operation` is one row: path, method, operationId, what it asks for, what it answers. The tables
below hold the rows of each listener; `_document` turns rows into a document. Path parameters are
read off the path's template, and the schemas of a document are those its rows refer to. So a new
route is one new row. Documents share their parts: they are to be written out, not changed.

Titles, operationIds and paths of TorchServe's documents are kept, since clients are generated from
them. Among these are ``/metrics`` on listeners that may not serve it (hence its 404) and the
misspelt ``/prediction/{name}`` of a model's document, beside which stands the path that works.
Beyond TorchServe's, every route that a listener serves is described.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]
# By status, or "default".
_Answers = Mapping[int | str, Json]

_OPENAPI = "3.0.1"
_TITLE = "TorchServe APIs"
_ABOUT = "TorchServe is a flexible and easy to use tool for serving deep learning models"
# The largest 32-bit integer: what TorchServe could read, and typed clients can hold.
_MOST = 2**31 - 1


def describe_inference(version: str) -> Json:
    """The document of the inference listener.

    Args:
        version: Of the server.

    Returns:
        An OpenAPI 3.0 document, as JSON values.
    """
    return _document(_server_info(version), _INFERENCE)


def describe_management(version: str) -> Json:
    """The document of the management listener; see `describe_inference`."""
    return _document(_server_info(version), _MANAGEMENT)


def describe_metrics(version: str) -> Json:
    """The document of the metrics listener; see `describe_inference`."""
    return _document(_server_info(version), [_METRICS])


def describe_shared(version: str) -> Json:
    """The document of a listener that serves inference, management and metrics."""
    return _document(_server_info(version), [*_INFERENCE, *_MANAGEMENT])


def describe_model_inference(name: str) -> Json:
    """How predictions are asked of one model.

    Args:
        name: Of the model.

    Returns:
        An OpenAPI 3.0 document, as JSON values.
    """
    info = {"title": f"RESTful API for: {name}", "version": "1.0.0"}
    segment = quote(name, safe="")
    misspelt = replace(
        _PREDICT,
        route=f"post /prediction/{segment}",
        name="prediction",
        summary="A misspelt path that old clients read here; nothing answers there.",
        deprecated=True,
    )
    true = replace(_PREDICT, route=f"post /predictions/{segment}")
    return _document(info, [misspelt, true, *_KSERVE_PREDICT], model_name=name)


def describe_model_management(name: str, version: str) -> Json:
    """How one model is managed.

    Args:
        name: Of the model.
        version: Of the server.

    Returns:
        An OpenAPI 3.0 document, as JSON values.
    """
    info = {"title": f"RESTful Management API for: {name}", "version": version}
    return _document(info, _ONE_MODEL, model_name=name)


# -- schemas ---------------------------------------------------------------------------------------


def _text(description: str, **more: Any) -> Json:
    return {"type": "string", "description": description, **more}


def _whole(description: str, **more: Any) -> Json:
    return {"type": "integer", "description": description, **more}


def _flag(description: str, **more: Any) -> Json:
    return {"type": "boolean", "description": description, **more}


def _list(items: Json, description: str = "", **more: Any) -> Json:
    about = {"description": description} if description else {}
    return {"type": "array", "items": items, **about, **more}


def _object(optional: Iterable[str] = (), /, **members: Json) -> Json:
    """An object whose members are always there, but for those named as optional."""
    absent = set(optional)
    required = [name for name in members if name not in absent]
    return {"type": "object", **({"required": required} if required else {}), "properties": members}


def _ref(schema: str) -> Json:
    return {"$ref": f"#/components/schemas/{schema}"}


_ANYTHING: Json = {}
_BYTES: Json = {"type": "string", "format": "binary"}
_PARAMETERS: Json = {"type": "object", "description": "Whatever else the handler uses."}

_SCHEMAS: Mapping[str, Json] = {
    "Error": _object(
        ["message"],
        code=_whole("The HTTP status once more."),
        type=_text("The kind of failure, a word that programs can rely on."),
        message=_text("One sentence for people."),
    ),
    "Status": _object(status=_text("What was done, or how the server is.")),
    "Document": _object(
        openapi=_text("Version of OpenAPI."), info={"type": "object"}, paths={"type": "object"}
    ),
    "Live": _object(live=_flag("Whether the server runs.")),
    "Ready": _object(ready=_flag("Whether requests are answered.")),
    "ModelReady": _object(
        name=_text("Name of the model."), ready=_flag("Whether the model has workers.")
    ),
    "ServerMetadata": _object(
        ["extensions", "extenstion"],
        name=_text("Name of the server."),
        version=_text("Version of the server."),
        extensions=_list({"type": "string"}, "What is offered beyond the protocol."),
        extenstion=_list({"type": "string"}, "The same under the name that TorchServe gave it."),
    ),
    "Instances": _object(instances=_list(_ANYTHING, "One element per prediction wanted.")),
    "InferenceRequest": _object(
        ["id", "parameters", "outputs"],
        id=_text("Comes back with the answer."),
        parameters=_PARAMETERS,
        inputs=_list(_ref("InputTensor"), "The tensors to work on."),
        outputs=_list({"type": "object"}, "The tensors wanted back; all of them when left out."),
    ),
    "InputTensor": _object(
        ["parameters"],
        name=_text("Name of the tensor."),
        shape=_list({"type": "integer"}, "Length of each dimension."),
        datatype=_text("Type of the elements: BOOL, INT64, FP32, BYTES, …"),
        data=_list(_ANYTHING, "The elements, row by row, flat or nested."),
        parameters=_PARAMETERS,
    ),
    "ModelList": _object(
        ["nextPageToken"],
        nextPageToken=_text(
            "To be sent along for the next page; absent when this one is not full."
        ),
        models=_list(_ref("ListedModel"), "Sorted by name, at most `limit` of them."),
    ),
    "ListedModel": _object(
        modelName=_text("Name of the model."),
        modelUrl=_text("Where its default version came from."),
    ),
    "Models": _list(_ref("Model"), "One element per version asked for.", minItems=1),
    "Model": _object(
        ["deviceIds", "customizedMetadata"],
        modelName=_text("Name of the model."),
        modelVersion=_text("Version of the model."),
        modelUrl=_text("Where the archive came from."),
        runtime=_text("What runs the handler, as the archive states it."),
        minWorkers=_whole("Workers that are kept running."),
        maxWorkers=_whole("Workers there may be at most."),
        batchSize=_whole("Requests that are predicted together at most."),
        maxBatchDelay=_whole("Milliseconds that a batch waits to be filled."),
        responseTimeout=_whole("Seconds that a worker may take for a batch."),
        startupTimeout=_whole("Seconds that a worker may take to load the model."),
        maxRetryTimeoutInSec=_whole("Seconds during which a failing worker is started again."),
        clientTimeoutInMills=_whole("Milliseconds after which a request expires; 0: never."),
        parallelType=_text("How one worker spans devices: pp, tp, pptp or custom; else empty."),
        parallelLevel=_whole("Processes that make up one worker."),
        deviceType=_text("What the model runs on: cpu, gpu, …"),
        deviceIds=_list({"type": "integer"}, "Devices it is bound to; absent when to none."),
        continuousBatching=_flag("Whether requests join a batch that is under way."),
        useJobTicket=_flag("Whether requests are refused when no worker is idle."),
        useVenv=_flag("Whether workers run in an environment of their own."),
        stateful=_flag("Whether requests are batched by sequence."),
        sequenceMaxIdleMSec=_whole("Milliseconds without a request that end a sequence."),
        sequenceTimeoutMSec=_whole("Milliseconds after which a sequence ends."),
        maxNumSequence=_whole("Sequences that are open at once at most."),
        maxSequenceJobQueueSize=_whole("Requests of one sequence that may wait."),
        loadedAtStartup=_flag("Whether a model of that name was loaded as the server started."),
        workers=_list(_ref("Worker"), "Its workers."),
        jobQueueStatus=_object(
            remainingCapacity=_whole("Requests that still find a place to wait."),
            pendingRequests=_whole("Requests that wait."),
        ),
        customizedMetadata={"type": "object", "description": "What the handler says of itself."},
    ),
    "Worker": _object(
        ["lastError"],
        id=_text("Number of the worker."),
        startTime=_text("Local time of its start, yyyy-MM-ddTHH:mm:ss.SSSZ."),
        status=_text("READY once the model is loaded.", enum=["READY", "UNLOADING"]),
        memoryUsage=_whole("Bytes of resident memory; 0 while unknown."),
        pid=_whole("Id of its process; -1 while there is none."),
        gpu=_flag("Whether it runs on a GPU."),
        gpuUsage=_text("Load and memory of its GPU; N/A without one."),
        lastError=_text("Why it failed last; absent if it never did."),
    ),
}


# -- what operations ask for and answer ------------------------------------------------------------


def _query(name: str, schema: Json, **more: Any) -> Json:
    """A query parameter; the description of its schema moves up to where readers look for it."""
    schema = dict(schema)
    about = schema.pop("description")
    return {"name": name, "in": "query", "description": about, "schema": schema, **more}


def _bounded(description: str, minimum: int, **more: Any) -> Json:
    return _whole(description, format="int32", minimum=minimum, maximum=_MOST, **more)


def _ignored(name: str) -> Json:
    return _query(name, _text("Of no effect, allowed for old clients."), deprecated=True)


def _content(schema: Json, media_type: str = "application/json") -> Json:
    return {"content": {media_type: {"schema": schema}}}


def _json(description: str, schema: str) -> Json:
    return {"description": description, **_content(_ref(schema))}


_ERRORS: Mapping[int, str] = {
    400: "The request, a parameter, the archive or the token cannot be used.",
    403: "Refused: the default version of others, or a web page without a token.",
    404: "No such model, version, archive or path.",
    405: "Not with this method, or models may not be changed by request.",
    408: "A worker could not be ended in time.",
    409: "That version of that model is there already.",
    500: "A worker or the server failed.",
    503: "No worker, no place to wait, or the prediction failed.",
    504: "The time of the request was over before it was answered.",
    507: "The worker ran out of memory.",
}


def _errors(*statuses: int) -> _Answers:
    return {status: _json(_ERRORS[status], "Error") for status in statuses}


def _answers(schema: str, *errors: int) -> _Answers:
    return {200: _json("Done.", schema), **_errors(*errors)}


_TOO_LARGE: _Answers = {413: {"description": "The body is longer than max_request_size. No body."}}
_UPDATED: _Answers = {
    202: _json("Taken on; the workers follow.", "Status"),
    206: _json("Done in part: not all workers run yet.", "Status"),
}
# Statuses, headers and bodies of a prediction are its handler's to choose.
_PREDICTED: _Answers = {
    200: {"description": "As the handler gave it.", **_content(_ANYTHING, "*/*")},
    **_errors(400, 404, 500, 503, 504, 507),
    **_TOO_LARGE,
    "default": {"description": "A status that the handler set.", **_content(_ANYTHING, "*/*")},
}


def _fields(value: Json) -> Json:
    return {"type": "object", "additionalProperties": value}


# The handler gets any body; of these types the server takes it apart first.
_ANY_BODY: Json = {
    "description": "The input. The fields of a form arrive one by one, anything else as `body`.",
    "content": {
        "application/octet-stream": {"schema": _BYTES},
        "application/json": {"schema": _ANYTHING},
        "text/plain": {"schema": {"type": "string"}},
        "application/x-www-form-urlencoded": {"schema": _fields({"type": "string"})},
        "multipart/form-data": {"schema": _fields(_BYTES)},
        "*/*": {"schema": _BYTES},
    },
}

_SYNCHRONOUS = "Whether to answer only when the workers run."
# Defaults below the smallest useful value are TorchServe's marks for "as configured".
_REGISTER_PARAMETERS: Mapping[str, Json] = {
    "url": _text("The archive: a name in the model store, a path, or an allowed URL."),
    "model_name": _text("Name to serve it under; else the archive's."),
    "handler": _text("Handler to use instead of the archive's."),
    "runtime": _text("What runs the handler.", enum=["python", "python3", "LSP"]),
    "batch_size": _bounded("Requests predicted together. Below 1: as configured.", -1, default=-1),
    "max_batch_delay": _bounded(
        "Milliseconds a batch waits to be filled. Below 0: as configured.", -100, default=-100
    ),
    "initial_workers": _bounded("Workers to start with; else as configured.", 0),
    "synchronous": _flag(_SYNCHRONOUS, default=True),
    "response_timeout": _bounded(
        "Seconds a worker may take for a batch. Below 1: as configured.", -1, default=-1
    ),
    "startup_timeout": _bounded(
        "Seconds a worker may take to load the model. Below 1: as configured.", -1, default=-1
    ),
    "s3_sse_kms": _flag("Whether the archive lies in S3, encrypted by KMS.", default=False),
}
_REGISTER_BODY: Json = {
    "description": "The same parameters; the query is then not looked at.",
    **_content(_object([*_REGISTER_PARAMETERS.keys() - {"url"}], **_REGISTER_PARAMETERS)),
}
_PATH_PARAMETERS: Mapping[str, Json] = {
    "model_name": _text("Name of the model."),
    "model_version": _text("Version of the model; where models are described also `all`."),
    "url_path": _text("Handed to the handler; may have more segments."),
}


# -- the operations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Operation:
    """A method and a path, what may be sent there and what comes back.

    Attributes:
        route: Method, in small letters, and template of the path.
        name: The operationId.
        summary: What it does.
        answers: By status.
        key: Which token opens it: inference, management or api; empty for everybody.
        query: Query parameters.
        body: Request body; None when none is read.
        deprecated: Whether there is a better one.
    """

    route: str
    name: str
    summary: str
    answers: _Answers
    key: str = ""
    query: Sequence[Json] = ()
    body: Json | None = None
    deprecated: bool = False


def _and_by_version(operation: _Operation) -> list[_Operation]:
    """The operation on a model's default version, and the one on a version in the path."""
    by_version = replace(
        operation,
        route=operation.route + "/{model_version}",
        name=f"version_{operation.name}",
        query=[one for one in operation.query if one["name"] != "model_version"],
    )
    return [operation, by_version]


def _predicting(path: str, name: str, summary: str, *query: Json) -> _Operation:
    return _Operation(f"post {path}", name, summary, _PREDICTED, "inference", query, _ANY_BODY)


def _kserve(path: str, name: str, summary: str, body: str) -> _Operation:
    document = {"required": True, **_content(_ref(body))}
    return replace(_predicting(path, name, summary), body=document)


def _asking(path: str, name: str, summary: str, answers: _Answers) -> _Operation:
    return _Operation(f"get {path}", name, summary, answers, "inference")


def _managing(route: str, name: str, summary: str, answers: _Answers, *query: Json) -> _Operation:
    guarded = {**answers, **_errors(400, 403)}  # a token, or else no web page from elsewhere
    return _Operation(route, name, summary, guarded, "management", query)


_DOCUMENT = _Operation("options /", "apiDescription", "Get this document.", _answers("Document"))
_OLD_DOCUMENT = replace(
    _DOCUMENT, route="get /api-description", name="api-description", deprecated=True
)
_METRICS = _Operation(
    "get /metrics",
    "metrics",
    "Get the metrics; none when they go to the log.",
    {
        200: {"description": "Prometheus text.", **_content({"type": "string"}, "text/plain")},
        **_errors(404),
    },
    query=[_query("name[]", _list({"type": "string"}, "Names of the samples; else all of them."))],
)

_PREDICT = _predicting("/predictions/{model_name}", "predictions", "Predict.")
_KSERVE_PREDICT = [
    _kserve("/v1/models/{model_name}:predict", "kserveV1Predict", "Predict.", "Instances"),
    _kserve("/v2/models/{model_name}/infer", "kserveV2Infer", "Predict.", "InferenceRequest"),
]
_UNHEALTHY: _Answers = {500: _json("Some model lacks healthy workers.", "Status")}
_INFERENCE: Sequence[_Operation] = [
    _DOCUMENT,
    _asking("/ping", "ping", "Ask for the health.", {**_answers("Status", 400), **_UNHEALTHY}),
    *_KSERVE_PREDICT,
    *_and_by_version(_PREDICT),
    _OLD_DOCUMENT,
    _METRICS,
    _predicting(
        "/predictions/{model_name}/{model_version}/{url_path}",
        "url_path_predictions",
        "Predict, with a path for the handler.",
    ),
    *_and_by_version(_predicting("/explanations/{model_name}", "explanations", "Explain.")),
    _predicting(
        "/invocations",
        "invocations",
        "Predict, as SageMaker asks.",
        _query("model_name", _text("The model; not needed when one was loaded at the start.")),
    ),
    _predicting("/models/{model_name}/invoke", "invoke", "Predict, as SageMaker asks."),
    *(
        replace(_predicting(path, name, "Predict, as old clients ask."), deprecated=True)
        for path, name in [
            ("/{model_name}/predict", "legacyPredict"),
            ("/{model_name}/{model_version}/predict", "version_legacyPredict"),
        ]
    ),
    _kserve("/v1/models/{model_name}:explain", "kserveV1Explain", "Explain.", "Instances"),
    _kserve("/v2/models/{model_name}/explain", "kserveV2Explain", "Explain.", "InferenceRequest"),
    _asking("/v2", "serverMetadata", "Ask who serves.", _answers("ServerMetadata", 400, 404)),
    _asking("/v2/health/live", "serverLive", "Ask for life.", _answers("Live", 400, 404)),
    _asking(
        "/v2/health/ready",
        "serverReady",
        "Ask whether requests are answered.",
        {**_answers("Ready", 400, 404), 503: _json("Not yet.", "Ready")},
    ),
]

_DESCRIBE = _managing(
    "get /models/{model_name}",
    "describeModel",
    "Describe a model.",
    _answers("Models", 404, 500, 503),
    _query("customized", _flag("Whether to ask the handler for its own words.", default=False)),
)
_SCALE = _managing(
    "put /models/{model_name}",
    "setAutoScale",
    "Set how many workers a model has.",
    {**_answers("Status", 404, 408, 500, 507), **_UPDATED},
    _query("min_worker", _bounded("Workers to keep running; 0 ends them all.", 0, default=1)),
    _query("max_worker", _bounded("Workers there may be; `min_worker` if left out.", 0)),
    _query("model_version", _text("Version to scale; the default one if left out.")),
    _query("synchronous", _flag(_SYNCHRONOUS, default=False)),
    _ignored("number_gpu"),
    _ignored("timeout"),
)
_UNREGISTER = _managing(
    "delete /models/{model_name}",
    "unregisterModel",
    "Unregister a model, and end its workers.",
    _answers("Status", 404, 405, 408, 500),
    _ignored("synchronous"),
    _ignored("timeout"),
)
_ONE_MODEL: Sequence[_Operation] = [
    *_and_by_version(_DESCRIBE),
    *_and_by_version(_SCALE),
    *_and_by_version(_UNREGISTER),
    _managing(
        "put /models/{model_name}/{model_version}/set-default",
        "setDefault",
        "Make a version the one that is meant when none is named.",
        _answers("Status", 404),
    ),
]
_LIST = _managing(
    "get /models",
    "listModels",
    "List the models.",
    _answers("ModelList"),
    _query("limit", _whole("Models on a page.", default=100, minimum=0, maximum=100)),
    _query("next_page_token", _bounded("Models to leave out: `nextPageToken`.", 0, default=0)),
)
_REGISTER = _managing(
    "post /models",
    "registerModel",
    "Register a model, and start workers for it.",
    {**_answers("Status", 404, 405, 409, 500, 507), **_UPDATED, **_TOO_LARGE},
    *(
        _query(name, schema, required=name == "url")
        for name, schema in _REGISTER_PARAMETERS.items()
    ),
)
_RENEW = _Operation(
    "get /token",
    "renewToken",
    "Renew a key; the new one is in the key file.",
    {200: {"description": "An empty line.", **_content(_ANYTHING)}, **_errors(400, 404)},
    "api",
    [_query("type", _text("The key.", enum=["management", "inference"]), required=True)],
)
_MANAGEMENT: Sequence[_Operation] = [
    _DOCUMENT,
    _LIST,
    replace(_REGISTER, body=_REGISTER_BODY),
    *_ONE_MODEL,
    _OLD_DOCUMENT,
    _METRICS,
    _managing(
        "get /v1/models/{model_name}",
        "kserveV1Ready",
        "Ask whether a model has workers.",
        _answers("ModelReady", 404),
    ),
    _RENEW,
]


# -- from operations to a document -----------------------------------------------------------------


def _server_info(version: str) -> Json:
    return {"title": _TITLE, "description": _ABOUT, "version": version}


def _document(info: Json, operations: Iterable[_Operation], **fixed: str) -> Json:
    """The document of these operations; ``fixed`` path parameters have one value only."""
    operations = list(operations)
    paths: Json = {}
    for operation in operations:
        method, path = operation.route.split(" ")
        paths.setdefault(path, {})[method] = _written(operation, fixed)
    return {
        "openapi": _OPENAPI,
        "info": info,
        "paths": paths,
        "components": {
            "schemas": _schemas_of(paths),
            "securitySchemes": _security_schemes(one.key for one in operations if one.key),
        },
    }


def _written(operation: _Operation, fixed: Mapping[str, str]) -> Json:
    written: Json = {
        "summary": operation.summary,
        "operationId": operation.name,
        "parameters": [*_path_parameters(operation.route, fixed), *operation.query],
        "responses": {str(status): answer for status, answer in operation.answers.items()},
        "security": _security(operation.key),
    }
    if operation.body is not None:
        written["requestBody"] = operation.body
    if operation.deprecated:
        written["deprecated"] = True
    return written


def _path_parameters(route: str, fixed: Mapping[str, str]) -> Iterator[Json]:
    for name in re.findall(r"{(\w+)}", route):
        one_value = {"enum": [fixed[name]]} if name in fixed else {}
        schema = {**_PATH_PARAMETERS[name], "minLength": 1, **one_value}
        yield _query(name, schema) | {"in": "path", "required": True}


def _security(key: str) -> list[Json]:
    """The key is needed, or nothing at all when authorization is off."""
    return [{f"{key}_key": []}, {}] if key else []


def _security_schemes(keys: Iterable[str]) -> Json:
    return {
        f"{key}_key": {
            "type": "http",
            "scheme": "bearer",
            "description": f"The {key} key of the key file, unless authorization is off.",
        }
        for key in keys
    }


def _schemas_of(paths: Json) -> Json:
    """The schemas these paths refer to, themselves or through others."""
    found: set[str] = set()
    to_visit = set(_references(paths))
    while to_visit:
        name = to_visit.pop()
        found.add(name)
        to_visit |= set(_references(_SCHEMAS[name])) - found
    return {name: schema for name, schema in _SCHEMAS.items() if name in found}


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if "$ref" in node:
            yield node["$ref"].rpartition("/")[2]
        node = list(node.values())
    if isinstance(node, list):
        for one in node:
            yield from _references(one)
