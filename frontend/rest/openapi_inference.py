"""What the inference listener offers, row by row."""

from collections.abc import Sequence
from dataclasses import replace

from marserve.frontend.rest.openapi_operations import (
    DOCUMENT,
    METRICS,
    OLD_DOCUMENT,
    Answers,
    Operation,
    and_by_version,
    answers,
    errors,
    header_parameter,
    json_of,
    query_parameter,
)
from marserve.frontend.rest.openapi_schemas import ANYTHING, BYTES, Json, content, ref, text

_RETRY_AFTER: Json = {
    "description": "Seconds after which another try may be in time; where that is why.",
    "schema": {"type": "integer", "minimum": 1},
}
# Statuses, headers and bodies of a prediction are its handler's to choose.
_PREDICTED: Answers = {
    200: {"description": "As the handler gave it.", **content(ANYTHING, "*/*")},
    **errors(400, 404, 408, 413, 500, 504, 507),
    503: {**errors(503)[503], "headers": {"Retry-After": _RETRY_AFTER}},
    "default": {"description": "A status that the handler set.", **content(ANYTHING, "*/*")},
}


_WISHES = [
    header_parameter(
        "X-Timeout-Ms",
        {
            "type": "number",
            "exclusiveMinimum": True,
            "minimum": 0,
            "description": "Milliseconds after which the answer is of no use: 503 if that can be "
            "foreseen, else 504. May only shorten the model's clientTimeoutInMills.",
        },
    ),
    header_parameter(
        "X-Priority",
        {
            "type": "string",
            "enum": ["high", "normal", "low"],
            "description": "Who goes first; in any case of letters. Nobody waits for ever.",
        },
    ),
]


def _fields(value: Json) -> Json:
    return {"type": "object", "additionalProperties": value}


# The handler gets any body; of these types the server takes it apart first.
_ANY_BODY: Json = {
    "description": "The input. The fields of a form arrive one by one, anything else as `body`. "
    "Models with dynamicBatchSize take a JSON array, or several files, as a request for each item.",
    "content": {
        "application/octet-stream": {"schema": BYTES},
        "application/json": {"schema": ANYTHING},
        "text/plain": {"schema": {"type": "string"}},
        "application/x-www-form-urlencoded": {"schema": _fields({"type": "string"})},
        "multipart/form-data": {"schema": _fields(BYTES)},
        "*/*": {"schema": BYTES},
    },
}


def _predicting(path: str, name: str, summary: str, *query: Json) -> Operation:
    parameters = [*query, *_WISHES]
    return Operation(f"post {path}", name, summary, _PREDICTED, "inference", parameters, _ANY_BODY)


def _instances(path: str, name: str, summary: str) -> Operation:
    document = {"required": True, **content(ref("Instances"))}
    return replace(_predicting(path, name, summary), body=document)


def _tensors(path: str, name: str, summary: str) -> Operation:
    document = {
        "required": True,
        "description": "The tensors, in the JSON or behind it. If behind it, the header "
        "Inference-Header-Content-Length tells where the JSON ends.",
        "content": {
            "application/json": {"schema": ref("InferenceRequest")},
            "application/octet-stream": {"schema": BYTES},
        },
    }
    return replace(_predicting(path, name, summary), body=document)


def _asking(path: str, name: str, summary: str, answered: Answers) -> Operation:
    return Operation(f"get {path}", name, summary, answered, "inference")


def _unready(schema: str) -> Answers:
    return {503: json_of("Not ready.", schema)}


PREDICT = _predicting("/predictions/{model_name}", "predictions", "Predict.")
KSERVE_PREDICT = [
    _instances("/v1/models/{model_name}:predict", "kserveV1Predict", "Predict."),
    _tensors("/v2/models/{model_name}/infer", "kserveV2Infer", "Predict."),
]
_UNHEALTHY: Answers = {500: json_of("Some model lacks healthy workers.", "Status")}
INFERENCE: Sequence[Operation] = [
    DOCUMENT,
    _asking("/ping", "ping", "Ask for the health.", {**answers("Status", 400), **_UNHEALTHY}),
    *KSERVE_PREDICT,
    *and_by_version(PREDICT),
    OLD_DOCUMENT,
    METRICS,
    Operation(
        "get /ready",
        "ready",
        "Ask whether every model can answer now.",
        {**answers("Readiness"), **_unready("Readiness")},
    ),
    _predicting(
        "/predictions/{model_name}/{model_version}/{url_path}",
        "url_path_predictions",
        "Predict, with a path for the handler.",
    ),
    *and_by_version(_predicting("/explanations/{model_name}", "explanations", "Explain.")),
    _predicting(
        "/explanations/{model_name}/{model_version}/{url_path}",
        "url_path_explanations",
        "Explain, with a path for the handler.",
    ),
    _predicting(
        "/invocations",
        "invocations",
        "Predict, as SageMaker asks.",
        query_parameter(
            "model_name",
            text("The model; else the only one loaded at the start, or the form field model_name."),
        ),
    ),
    _predicting("/models/{model_name}/invoke", "invoke", "Predict, as SageMaker asks."),
    *(
        replace(_predicting(path, name, "Predict, as old clients ask."), deprecated=True)
        for path, name in [
            ("/{model_name}/predict", "legacyPredict"),
            ("/{model_name}/{model_version}/predict", "version_legacyPredict"),
        ]
    ),
    _instances("/v1/models/{model_name}:explain", "kserveV1Explain", "Explain."),
    _tensors("/v2/models/{model_name}/explain", "kserveV2Explain", "Explain."),
]

_V2_MODEL = "/v2/models/{model_name}"
_V2_VERSION = _V2_MODEL + "/versions/{model_version}"


def _v2_model(path: str, prefix: str) -> list[Operation]:
    """What the whole protocol tells of a model, or of a version of it."""
    return [
        _asking(
            path, f"{prefix}modelMetadata", "Ask about a model.", answers("ModelMetadata", 400, 404)
        ),
        _asking(
            f"{path}/ready",
            f"{prefix}modelReady",
            "Ask whether a model can answer now.",
            {**answers("ModelReady", 400, 404), **_unready("ModelReady")},
        ),
    ]


#: Only where the whole Open Inference Protocol is on.
OPEN_INFERENCE: Sequence[Operation] = [
    _asking("/v2", "serverMetadata", "Ask who serves.", answers("ServerMetadata", 400)),
    _asking("/v2/health/live", "serverLive", "Ask for life.", answers("Live", 400)),
    _asking(
        "/v2/health/ready",
        "serverReady",
        "Ask whether every model can answer now.",
        {**answers("Ready", 400), **_unready("Ready")},
    ),
    *_v2_model(_V2_MODEL, ""),
    *_v2_model(_V2_VERSION, "version_"),
    _tensors(f"{_V2_VERSION}/infer", "version_kserveV2Infer", "Predict."),
    _tensors(f"{_V2_VERSION}/explain", "version_kserveV2Explain", "Explain."),
]
