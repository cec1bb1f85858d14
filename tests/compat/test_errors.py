"""What the server says by itself: status, phrase, headers and body, to the byte."""

import json

import pytest

pytestmark = pytest.mark.integration

ROUTE = (
    "ResourceNotFoundException",
    "Requested resource is not found, please refer to API document.",
)
METHOD = (
    "MethodNotAllowedException",
    "Requested method is not allowed, please refer to API document.",
)
NO_WORKER = (
    " has no worker to serve inference request. Please use scale workers API to add workers. "
    "If this is a sequence inference, please check if it is closed, or expired; "
    "or exceeds maxSequenceJobQueueSize"
)
PHRASES = {
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    500: "Internal Server Error",
    503: "Service Unavailable",
    507: "Insufficient Storage",
}
HEADERS = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
    "content-type": "application/json",
    "connection": "keep-alive",
}


def model(name):
    return "ModelNotFoundException", f"Model not found: {name}"


def model_at(url):
    return "ModelNotFoundException", f"Model not found at: {url}"


def version(number, name="probe"):
    text = f"Model version: {number} does not exist for model: {name}"
    return "ModelVersionNotFoundException", text


def bad(text):
    return "BadRequestException", text


def invalid(text):
    return "InvalidModelException", text


def refused(answer, status, kind, message):
    """Whether an answer is this error and nothing else."""
    assert (answer.status, answer.reason) == (status, PHRASES[status])
    assert answer.body.decode() == (
        f'{{\n  "code": {status},\n  "type": "{kind}",\n  "message": {json.dumps(message)}\n}}\n'
    )
    headers = dict(answer.headers)
    assert len(headers.pop("x-request-id")) == 36
    assert headers == {**HEADERS, "content-length": str(len(answer.body))}


@pytest.mark.parametrize(
    ("line", "status", "error"),
    [
        ("GET /nowhere", 404, ROUTE),
        ("GET //ping", 404, ROUTE),
        ("GET /", 405, METHOD),
        ("POST /", 405, METHOD),
        ("GET /models", 404, ROUTE),
        ("GET /models/probe", 404, ROUTE),
        ("GET /metrics", 404, ROUTE),
        ("GET /token?type=management", 404, ROUTE),
        ("POST /PREDICTIONS/probe", 404, ROUTE),
        ("POST /predictions", 404, ROUTE),
        ("POST /predictions/", 404, ROUTE),
        ("POST /predictions/nobody", 404, model("nobody")),
        ("POST /predictions/nobody/1.0", 404, model("nobody")),
        ("POST /predictions/PROBE", 404, model("PROBE")),
        ("POST /predictions/probe;v=1", 404, model("probe;v=1")),
        ("POST /predictions/probe/9.9", 404, version("9.9")),
        ("POST /predictions/probe/9.9/more", 404, version("9.9")),
        ("OPTIONS /predictions/nobody", 404, model("nobody")),
        ("POST /explanations", 404, ROUTE),
        ("POST /explanations/nobody", 404, model("nobody")),
        ("POST /explanations/probe/9.9", 404, version("9.9")),
        ("POST /invocations", 400, bad("Parameter model_name is required.")),
        ("POST /invocations?model_name=nobody", 404, model("nobody")),
        ("POST /invocations/probe", 404, ROUTE),
        ("POST /models/nobody/invoke", 404, model("nobody")),
        ("POST /models/probe/other", 404, ROUTE),
        ("POST /models/probe/invoke/more", 404, ROUTE),
        ("POST /nobody/predict", 404, model("nobody")),
        ("POST /probe/9.9/predict", 404, version("9.9")),
        ("POST /probe/1.0/other/predict", 404, ROUTE),
        ("POST /predict", 404, ROUTE),
        ("POST /v1/models/nobody:predict", 404, model("nobody")),
        ("POST /v1/models/nobody:explain", 404, model("nobody")),
        ("POST /v1/models/probe", 404, ROUTE),
        ("POST /v1/models/probe:other", 404, ROUTE),
        ("POST /v1/models", 404, ROUTE),
        ("POST /v2/models/nobody/infer", 404, model("nobody")),
        ("POST /v2/models/probe", 404, ROUTE),
        ("POST /v2/models/probe/other", 404, ROUTE),
        ("POST /v2", 404, ROUTE),
        ("GET /v2/health/ready", 404, ROUTE),
    ],
)
def test_of_the_inference_listener(ask, line, status, error):
    refused(ask(line), status, *error)


@pytest.mark.parametrize(
    ("line", "status", "error"),
    [
        ("GET /nowhere", 404, ROUTE),
        ("GET /", 405, METHOD),
        ("GET /ping", 404, ROUTE),
        ("POST /predictions/probe", 404, ROUTE),
        ("GET /metrics", 404, ROUTE),
        ("GET /token?type=management", 404, ROUTE),
        ("PUT /models", 405, METHOD),
        ("DELETE /models", 405, METHOD),
        ("PATCH /models", 405, METHOD),
        ("POST /models/probe", 405, METHOD),
        ("POST /models/probe/1.0", 405, METHOD),
        ("GET /models/a/b/c", 404, ROUTE),
        ("GET /models/nobody", 404, model("nobody")),
        ("GET /models/nobody/1.0", 404, model("nobody")),
        ("GET /models/nobody/all", 404, model("nobody")),
        ("PUT /models/nobody", 404, model("nobody")),
        ("DELETE /models/nobody", 404, model("nobody")),
        ("OPTIONS /models/nobody", 404, model("nobody")),
        ("GET /models/probe/9", 404, version("9")),
        ("PUT /models/probe/9", 404, version("9")),
        ("DELETE /models/probe/9", 404, version("9")),
        ("PUT /models/probe?model_version=9", 404, version("9")),
        ("PUT /models/nobody/1/set-default", 404, model("nobody")),
        (
            "PUT /models/probe/9/set-default",
            404,
            ("ModelVersionNotFoundException", "Model version 9 does not exist for model probe"),
        ),
        ("GET /models/nobody?customized=true", 404, model("nobody")),
        ("GET /v1/models/nobody", 404, model("nobody")),
        ("POST /v1/models/probe", 405, METHOD),
        ("DELETE /v1/models/probe", 405, METHOD),
        ("GET /v1/models", 404, ROUTE),
        (
            "PUT /models/probe?min_worker=2&max_worker=1",
            400,
            bad("max_worker cannot be less than min_worker."),
        ),
        (
            "PUT /models/probe?max_worker=0",
            400,
            bad("max_worker cannot be less than min_worker."),
        ),
        ("POST /models", 400, bad("Parameter url is required.")),
        ("POST /models?model_name=x", 400, bad("Parameter url is required.")),
        ("POST /models?url=", 404, ("ModelNotFoundException", "empty url")),
        ("POST /models?url=no.mar", 404, model_at("no.mar")),
        ("POST /models?url=/no/such/place", 404, model_at("/no/such/place")),
        ("POST /models?url=ftp://127.0.0.1/no.mar", 404, model_at("ftp://127.0.0.1/no.mar")),
        (
            "POST /models?url=a/../../no.mar",
            404,
            ("ModelNotFoundException", "Relative path is not allowed in url: a/../../no.mar"),
        ),
        (
            "POST /models?url=http:///no.mar",
            400,
            (
                "DownloadArchiveException",
                "Failed to download archive from: http:///no.mar: the URL is malformed.",
            ),
        ),
        (
            "POST /models?url=file:///no/such.mar",
            400,
            (
                "DownloadArchiveException",
                "Failed to download archive from: file:///no/such.mar: No such file or directory.",
            ),
        ),
        (
            "POST /models?url=probe.mar&runtime=java",
            400,
            bad("Invalid RuntimeType value: java"),
        ),
        (
            "POST /models?url=probe.mar",
            409,
            (
                "ConflictStatusException",
                "Model version 1.0 is already registered for model probe",
            ),
        ),
        ("POST /models?url=manifest-no-name.mar", 400, invalid("Model name is not defined.")),
        (
            "POST /models?url=manifest-unknown-runtime.mar",
            400,
            invalid("Runtime is not defined or invalid."),
        ),
        ("POST /models?url=manifest-list.mar", 400, invalid("Failed to parse signature.json.")),
        ("POST /models?url=manifest-no-json.mar", 400, invalid("Failed to parse signature.json.")),
    ],
)
def test_of_the_management_listener(ask, line, status, error):
    refused(ask(line, to="management"), status, *error)


@pytest.mark.parametrize(
    ("line", "status", "error"),
    [
        ("GET /nowhere", 404, ROUTE),
        ("GET /", 405, METHOD),
        ("GET /ping", 404, ROUTE),
        ("GET /models", 404, ROUTE),
    ],
)
def test_of_the_metrics_listener(ask, line, status, error):
    refused(ask(line, to="metrics"), status, *error)


@pytest.mark.parametrize(
    ("path", "who"),
    [
        ("/predictions/idle", 'Model "idle"'),
        ("/predictions/idle/1.0", 'Model "idle" Version 1.0"'),
        ("/explanations/idle", 'Model "idle"'),
        ("/v1/models/idle:predict", 'Model "idle"'),
        ("/v2/models/idle/infer", 'Model "idle"'),
        ("/invocations?model_name=idle", 'Model "idle"'),
        ("/models/idle/invoke", 'Model "idle"'),
    ],
)
def test_a_model_without_workers(ask, server, path, who):
    server.register("probe.mar", model_name="idle")
    refused(ask(f"POST {path}"), 503, "ServiceUnavailableException", who + NO_WORKER)


def test_a_description_of_a_model_without_workers(ask, server):
    server.register("probe.mar", model_name="idle")
    answer = ask("GET /models/idle?customized=true", to="management")
    text = 'Model "idle" has no worker to serve describe request. '
    text += "Please use scale workers API to add workers."
    refused(answer, 503, "ServiceUnavailableException", text)


@pytest.mark.parametrize(
    ("order", "status", "message"),
    [
        ('{"do": "memory"}', 507, "Out of resources"),
        ('{"do": "too few"}', 503, "number of batch response mismatched"),
        ('{"do": "too many"}', 503, "number of batch response mismatched"),
        ('{"do": "tuple"}', 503, "Invalid model predict output"),
        ('{"do": "nothing"}', 503, "Invalid model predict output"),
        ('{"do": "refuse", "message": "not so", "code": 400}', 400, "not so"),
        ('{"do": "refuse", "message": "too large", "code": 413}', 507, "too large"),
        ('{"do": "refuse", "message": "full", "code": 507}', 507, "full"),
        (
            '{"do": "os._exit"}',
            500,
            "Worker died. Its process ended with exit status 3.",
        ),
    ],
)
def test_of_a_handler_that_fails(ask, order, status, message):
    answer = ask("POST /predictions/lab", order, "application/json")
    refused(answer, status, "InternalServerException", message)


def test_of_a_handler_that_raises(ask):
    answer = ask("POST /predictions/lab", '{"do": "raise"}', "application/json")
    id_ = dict(answer.headers)["x-request-id"]
    message = f"Prediction failed. The traceback is in model_log.log, with the request id {id_}."
    refused(answer, 503, "InternalServerException", message)


@pytest.mark.parametrize("line", ["HEAD /nowhere", "HEAD /models"])
def test_head_has_the_headers_and_no_body(ask, line):
    answer = ask(line)
    assert (answer.status, answer.body) == (404, b"")
    assert int(dict(answer.headers)["content-length"]) > 100
