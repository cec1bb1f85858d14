"""From what a handler returns and sets to the bytes of the answer; streams; descriptions."""

import io
import json
import re

import pytest

pytestmark = pytest.mark.integration

JSON = "application/json"
NO_CACHE = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}
LAB = '{\n  "id": null,\n  "batch": 1\n}'


def headers_of(answer):
    """The headers besides those that every answer has."""
    headers = dict(answer.headers)
    assert len(headers) == len(answer.headers)  # none twice
    assert len(headers.pop("x-request-id")) == 36
    assert {name: headers.pop(name) for name in NO_CACHE} == NO_CACHE
    return headers


@pytest.mark.parametrize(
    ("result", "body"),
    [
        ("bytes", b"\x00\xff"),
        ("bytearray", b"\x00\xff"),
        ("str", "grüße".encode()),
        (
            "dict",
            b'{\n  "k": [\n    1,\n    "\\u00fc",\n    null\n  ],\n'
            b'  "html": "<a href=\'x\'>&</a>"\n}',
        ),
        ("list", b"[\n  1,\n  2\n]"),
        ("nested", b"[\n  [],\n  {},\n  [\n    [\n      1\n    ]\n  ]\n]"),
        ("tuple", b"[\n  1,\n  2\n]"),
        ("int keys", b'{\n  "1": "one",\n  "null": "none"\n}'),
        ("int", b"7"),
        ("float", b"0.5"),
        ("bool", b"true"),
        ("none", b"null"),
        ("nan", b"NaN"),
        ("infinity", b"Infinity"),
        ("empty", b""),
        ("empty dict", b"{}"),
    ],
)
def test_a_result(ask, result, body):
    answer = ask("POST /predictions/results", result, "text/plain")
    assert (answer.status, answer.reason, answer.body) == (200, "", body)
    expected = {"content-length": str(len(body)), "connection": "keep-alive"}
    assert headers_of(answer) == expected


def test_a_tensor(ask):
    torch = pytest.importorskip("torch")
    answer = ask("POST /predictions/results", "tensor", "text/plain")
    assert answer.status == 200
    assert torch.load(io.BytesIO(answer.body)).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("result", ["opaque", "set"])
def test_a_result_that_cannot_be_written(ask, result):
    answer = ask("POST /predictions/results", result, "text/plain")
    refusal = json.loads(answer.body)
    assert (answer.status, refusal["code"]) == (503, 503)
    assert refusal["type"] == "InternalServerException"
    assert refusal["message"].startswith("Unsupported model output data type. prediction is ")


@pytest.mark.parametrize(
    ("order", "status_line", "headers"),
    [
        ('{"status": [201]}', (201, ""), {}),
        ('{"status": [201, "Made"]}', (201, "Made"), {}),
        ('{"status": [299]}', (299, ""), {}),
        ('{"status": [302], "headers": {"Location": "/x"}}', (302, ""), {"Location": "/x"}),
        ('{"status": [400, "Bad"]}', (400, "Bad"), {}),
        ('{"status": [418, "My Phrase"]}', (418, "My Phrase"), {}),
        ('{"status": [500]}', (500, ""), {}),
        ('{"status": [507]}', (507, ""), {}),
        ('{"headers": {"X-Mine": "one"}}', (200, ""), {"X-Mine": "one"}),
        ('{"headers": {"X-Empty": ""}}', (200, ""), {"X-Empty": ""}),
        ('{"headers": {"Set-Cookie": "a=1"}}', (200, ""), {"Set-Cookie": "a=1"}),
        ('{"headers": {"x-request-id": "mine"}}', (200, ""), {}),
        ('{"headers": {"Pragma": "mine"}}', (200, ""), {}),
        ('{"headers": {"Cache-Control": "max-age=1"}}', (200, ""), {}),
        ('{"headers": {"Content-Length": "1"}}', (200, ""), {}),
        ('{"headers": {"Connection": "close"}}', (200, ""), {}),
        ('{"headers": {"Content-Type": "a/b"}}', (200, ""), {"Content-Type": "a/b"}),
        ('{"type": "text/plain"}', (200, ""), {"content-type": "text/plain"}),
        (
            '{"type": "text/plain", "headers": {"content-type": "a/b"}}',
            (200, ""),
            {"content-type": "text/plain"},
        ),
    ],
)
def test_status_and_headers_that_a_handler_sets(ask, order, status_line, headers):
    answer = ask("POST /predictions/lab", order, JSON)
    assert (answer.status, answer.reason) == status_line
    assert answer.body.decode() == LAB
    expected = {
        **headers,
        "content-length": str(len(LAB)),
        "connection": "keep-alive",
    }
    assert headers_of(answer) == expected


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_that_has_no_body(ask, status):
    answer = ask("POST /predictions/lab", f'{{"status": [{status}]}}', JSON)
    assert (answer.status, answer.body) == (status, b"")


@pytest.mark.parametrize(
    ("path", "order", "status_line", "chunks", "headers"),
    [
        ("/predictions/stream", '{"pieces": 1}', (200, ""), ["piece 0;", "last"], {}),
        (
            "/predictions/stream",
            '{"pieces": 3}',
            (200, ""),
            ["piece 0;", "piece 1;", "piece 2;", "last"],
            {},
        ),
        (
            "/predictions/stream",
            '{"pieces": 1, "headers": {"content-type": "text/event-stream"}}',
            (200, ""),
            ["piece 0;", "last"],
            {"content-type": "text/event-stream"},
        ),
        (
            "/predictions/stream",
            '{"pieces": 1, "status": [201, "Made"]}',
            (201, "Made"),
            ["piece 0;", "last"],
            {},
        ),
        ("/v1/models/stream:predict", '{"pieces": 1}', (200, ""), ["piece 0;", "last"], {}),
        ("/models/stream/invoke", '{"pieces": 1}', (200, ""), ["piece 0;", "last"], {}),
    ],
)
def test_a_stream(ask, path, order, status_line, chunks, headers):
    answer = ask(f"POST {path}", order, JSON)
    assert (answer.status, answer.reason) == status_line
    assert answer.chunks == [chunk.encode() for chunk in chunks]
    assert headers_of(answer) == {
        "ts_stream_next": "true",
        "transfer-encoding": "chunked",
        "connection": "keep-alive",
        **headers,
    }


def test_a_stream_that_fails_is_cut(ask):
    answer = ask("POST /predictions/stream", '{"pieces": 2, "fail": "raise"}', JSON)
    assert (answer.status, answer.chunks, answer.cut) == (200, [b"piece 0;", b"piece 1;"], True)


def test_nothing_to_stream_is_an_answer_like_any_other(ask):
    answer = ask("POST /predictions/stream", '{"pieces": 0}', JSON)
    assert (answer.body, answer.chunks) == (b"last", None)


def test_an_explanation(ask):
    answer = ask("POST /explanations/describing", "hello", "text/plain")
    assert (answer.status, answer.body) == (200, b'{\n  "explained": "hello"\n}')
    assert ask("POST /predictions/describing", "hello", "text/plain").body == b"predicted hello"


DESCRIPTION = """[
  {
    "modelName": "describing",
    "modelVersion": "1.0",
    "modelUrl": "describing.mar",
    "runtime": "python",
    "minWorkers": 1,
    "maxWorkers": 1,
    "batchSize": 1,
    "maxBatchDelay": 100,
    "responseTimeout": 60,
    "startupTimeout": 120,
    "maxRetryTimeoutInSec": 300,
    "clientTimeoutInMills": 0,
    "parallelType": "",
    "parallelLevel": 0,
    "deviceType": "cpu",
    "continuousBatching": false,
    "useJobTicket": false,
    "useVenv": false,
    "stateful": false,
    "sequenceMaxIdleMSec": 0,
    "sequenceTimeoutMSec": 0,
    "maxNumSequence": 0,
    "maxSequenceJobQueueSize": 0,
    "loadedAtStartup": false,
    "workers": [
      {
        "id": "<worker>",
        "startTime": "<time>",
        "status": "READY",
        "memoryUsage": <number>,
        "pid": <number>,
        "gpu": false,
        "gpuUsage": "N/A"
      }
    ],
    "jobQueueStatus": {
      "remainingCapacity": 100,
      "pendingRequests": 0
    }%s
  }
]
"""
CUSTOMIZED = """,
    "customizedMetadata": {
      "classes": [
        "a",
        "b"
      ],
      "nested": {
        "n": 1
      },
      "html": "<b>"
    }"""


@pytest.mark.parametrize(
    ("path", "customized"),
    [
        ("describing", ""),
        ("describing/1.0", ""),
        ("describing/all", ""),
        ("describing?customized=false", ""),
        ("describing?customized=true", CUSTOMIZED),
        ("describing/1.0?customized=TRUE", CUSTOMIZED),
    ],
)
def test_a_description_to_the_byte(ask, path, customized):
    answer = ask(f"GET /models/{path}", to="management")
    text = re.sub(r'(memoryUsage|pid)": \d+', r'\1": <number>', answer.body.decode())
    text = re.sub(r'startTime": "[-0-9]{10}T[:0-9]{8}\.\d{3}Z"', 'startTime": "<time>"', text)
    text = re.sub(r'"id": "\d+"', '"id": "<worker>"', text)
    text, ours = re.subn(r'(?s),\n    "batchPolicy": .*\n    \}(?=\n  \}\n\]\n$)', "", text)
    assert ours == 1  # behind all that is TorchServe's
    text, ours = re.subn(r'(?s),\n        "state": "READY",.*?\n        \}(?=\n      \})', "", text)
    assert ours == 1  # likewise, of the worker
    assert text == DESCRIPTION % customized
    assert answer.header("content-type") == JSON


@pytest.mark.parametrize(
    ("line", "to", "body"),
    [
        ("GET /ping", "inference", '{\n  "status": "Healthy"\n}\n'),
        ("POST /ping/deeper/still", "inference", '{\n  "status": "Healthy"\n}\n'),
        (
            "GET /v1/models/probe",
            "management",
            '{\n  "name": "probe",\n  "ready": true\n}\n',
        ),
        (
            "GET /models?limit=1",
            "management",
            '{\n  "nextPageToken": "1",\n  "models": [\n    {\n'
            '      "modelName": "describing",\n      "modelUrl": "describing.mar"\n    }\n  ]\n}\n',
        ),
        ("GET /models?limit=0", "management", '{\n  "nextPageToken": "0",\n  "models": []\n}\n'),
        ("GET /models?next_page_token=99", "management", '{\n  "models": []\n}\n'),
        (
            "PUT /models/probe?min_worker=1",
            "management",
            '{\n  "status": "Processing worker updates..."\n}\n',
        ),
        (
            "PUT /models/probe?min_worker=1&synchronous=true",
            "management",
            '{\n  "status": "Workers scaled to 1 for model: probe"\n}\n',
        ),
        (
            "PUT /models/probe/1.0?min_worker=1&synchronous=true",
            "management",
            '{\n  "status": "Workers scaled to 1 for model: probe, version: 1.0"\n}\n',
        ),
        (
            "PUT /models/probe/1.0/set-default",
            "management",
            '{\n  "status": "Default version successfully updated for model '
            '\\"probe\\" to \\"1.0\\""\n}\n',
        ),
    ],
)
def test_what_succeeds_to_the_byte(ask, line, to, body):
    answer = ask(line, to=to)
    assert (answer.status, answer.reason) == (
        (202, "Accepted") if "Processing" in body else (200, "OK")
    )
    assert answer.body.decode() == body
    expected = {
        "content-type": JSON,
        "content-length": str(len(body)),
        "connection": "keep-alive",
    }
    assert headers_of(answer) == expected
