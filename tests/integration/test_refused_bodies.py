"""What is left of the bodies of requests that fail, while the collector of cycles does not run."""

import contextlib
import json
import os
import uuid
from functools import partial

import numpy as np
import psutil
import pytest
from grpc_client import connected, failure
from infer_client import infer
from servers import make_workflow
from watched_program import WITHOUT_COLLECTOR, make_program

pytestmark = pytest.mark.integration

SIZE = 6_000_000
REQUESTS = 8
#: Bodies that may be in memory afterwards: the last one, copies of it, and fragments.
LEFT = 3
BODY = b"x" * SIZE
JSON = {"headers": {"content-type": "application/json"}}

HANDLER = """
import os, time

def handle(data, context):
    if data is None:
        return None
    {}
"""
RAISING = HANDLER.format("raise ValueError('no')")
MODELS = {
    "raising": (RAISING, "", {}),
    "idle": (RAISING, "", {"initial_workers": 0}),
    "slow": (HANDLER.format("time.sleep(0.1); return ['x'] * len(data)"), "", {}),
    "dying": (HANDLER.format("os._exit(1)"), "", {}),
    "wrong": (HANDLER.format("return []"), "", {}),
    "unsendable": (HANDLER.format("return [object()]"), "", {}),
    "lists": (RAISING, "dynamicBatchSize: true\n", {"batch_size": 4}),
    "held": (
        HANDLER.format("time.sleep(0.1); return ['x'] * len(data)"),
        "dynamicBatchSize: true\n",
        {"batch_size": 4},
    ),
    "embed": (HANDLER.format("return ['no embedding'] * len(data)"), "openai: embeddings\n", {}),
    "rank": (HANDLER.format("return ['no score'] * len(data)"), "openai: rerank\n", {}),
    "sequences": (RAISING, "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\n", {}),
    "streaming": (
        HANDLER.format(
            "context.send_intermediate(['x'], context.request_ids); raise ValueError('no')"
        ),
        "",
        {},
    ),
    "caller": (
        "async def handle(data, context):\n"
        "    return data and [(await context.infer('raising', data[0]['body'])).body]\n",
        "asyncCommunication: true\n",
        {},
    ),
}
FAILING = "def a(data, context):\n    assert data is None\nb = c = a\n"
DAG = "models: {retry-attempts: 1}\ndag: {a: [b, c]}\n"


@pytest.fixture(scope="module")
def server(prepare_server, tmp_path_factory):
    with prepare_server(
        {WITHOUT_COLLECTOR: "1"}, ts_open_inference_protocol="true", max_workflow_runs="1"
    ) as server:
        server.program = make_program(tmp_path_factory.mktemp("bin"))
        server.start()
        for name, (handler, config, query) in MODELS.items():
            server.install(handler, name, config, **query)
        make_workflow(server.store, "flow", DAG, FAILING)
        assert server.management("POST", "/workflows?url=flow.war").status_code == 200
        with connected(server) as client:
            server.client = client
            yield server
        server.stop()


def document(**members):
    return json.dumps(members).encode()


def rerank(documents, **members):
    return document(model="rank", query="q" * SIZE, documents=["d"] * documents, **members)


def tensors(server, name, shape):
    return infer(server, name, np.zeros(SIZE // 4, "<f4").reshape(shape))


def in_sequence(server, id_):
    return server.predict("sequences", data=BODY, headers={"ts_request_sequence_id": id_})


def grpc_status(call):
    return failure(call)[0]


#: By kind of failure: a request, and the status that it must have.
FAILURES = {
    "no worker": (lambda s: s.predict("idle", data=BODY), 503),
    "no such model": (lambda s: s.predict("nobody", data=BODY), 404),
    "no such path": (lambda s: s.inference("POST", "/nowhere/at/all", data=BODY), 404),
    "no such version": (lambda s: s.inference("POST", "/predictions/slow/7", data=BODY), 404),
    "too long": (lambda s: s.predict("slow", data=BODY * 2), 413),
    "expired on arrival": (
        lambda s: s.predict("slow", data=BODY, headers={"X-Timeout-Ms": "1"}),
        504,
    ),
    "a long list that expires": (
        lambda s: s.predict(
            "held", json=["x" * (SIZE // 400)] * 400, headers={"X-Timeout-Ms": "250"}
        ),
        504,
    ),
    "expired in a worker": (
        lambda s: s.predict("slow", data=BODY, headers={"X-Timeout-Ms": "60"}),
        504,
    ),
    "a handler raises": (lambda s: s.predict("raising", data=BODY), 503),
    "a worker dies": (lambda s: s.predict("dying", data=os.urandom(SIZE)), 500),
    "too few results": (lambda s: s.predict("wrong", data=BODY), 503),
    "a result cannot be sent": (lambda s: s.predict("unsendable", data=BODY), 503),
    "a called model fails": (lambda s: s.predict("caller", data=BODY), 503),
    "a sequence for a handler that raises": (lambda s: in_sequence(s, "1"), 503),
    "too many sequences": (lambda s: in_sequence(s, uuid.uuid4().hex), 503),
    "not the fast path, a handler raises": (
        lambda s: s.inference("PATCH", "/predictions/raising", data=BODY),
        503,
    ),
    "not the fast path, no worker": (
        lambda s: s.inference("PATCH", "/predictions/idle", data=BODY),
        503,
    ),
    "not the fast path, expired": (
        lambda s: s.inference(
            "PATCH", "/predictions/slow", data=BODY, headers={"X-Timeout-Ms": "60"}
        ),
        504,
    ),
    "a form is malformed": (
        lambda s: s.predict(
            "slow",
            data=b"a=%" + BODY,
            headers={"content-type": "application/x-www-form-urlencoded"},
        ),
        400,
    ),
    "a file of a form": (lambda s: s.predict("raising", files={"body": BODY}), 503),
    "items of a list": (lambda s: s.predict("lists", json=["x" * (SIZE // 4)] * 4), 503),
    "a long list of items": (lambda s: s.predict("lists", json=["x" * (SIZE // 200)] * 200), 503),
    "inputs of embeddings": (
        lambda s: s.inference(
            "POST", "/v1/embeddings", json={"model": "embed", "input": "x" * SIZE}
        ),
        500,
    ),
    "a long list of inputs": (
        lambda s: s.inference(
            "POST", "/v1/embeddings", json={"model": "embed", "input": ["x" * (SIZE // 200)] * 200}
        ),
        500,
    ),
    "a wrong member": (
        lambda s: s.inference(
            "POST", "/v1/embeddings", json={"model": "embed", "input": {"x": "x" * SIZE}}
        ),
        400,
    ),
    "no model in a body": (
        lambda s: s.inference("POST", "/v1/embeddings", json={"input": "x" * SIZE}),
        400,
    ),
    "an unknown model in a body": (
        lambda s: s.inference("POST", "/v1/embeddings", json={"model": "no", "input": "x" * SIZE}),
        404,
    ),
    "no object": (lambda s: s.inference("POST", "/v1/embeddings", data=BODY, **JSON), 400),
    "a query for many documents": (
        lambda s: s.inference("POST", "/v1/rerank", data=rerank(110), **JSON),
        500,
    ),
    "scores": (lambda s: s.inference("POST", "/v1/rerank", data=rerank(3), **JSON), 500),
    "a wrong number": (
        lambda s: s.inference("POST", "/v1/rerank", data=rerank(3, top_n=-1), **JSON),
        400,
    ),
    "tensors of a handler that raises": (lambda s: tensors(s, "raising", (2, SIZE // 8)), 503),
    "rows of tensors": (lambda s: tensors(s, "lists", (4, SIZE // 16)), 503),
    "a long list of rows of tensors": (lambda s: tensors(s, "lists", (200, SIZE // 800)), 503),
    "tensors in JSON": (
        lambda s: s.inference(
            "POST",
            "/v2/models/lists/infer",
            data=b'{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[%b1]}]}'
            % (b"1," * (SIZE // 2)),
            **JSON,
        ),
        400,
    ),
    "nodes of a workflow": (lambda s: s.inference("POST", "/wfpredict/flow", data=BODY), 500),
    "no such workflow": (lambda s: s.inference("POST", "/wfpredict/no", data=BODY), 404),
    "a registration": (lambda s: s.management("POST", "/models", data=BODY, **JSON), 400),
    "a description": (
        lambda s: s.management("GET", "/models/raising?customized=true", data=BODY),
        503,
    ),
    "a prediction by the dashboard": (
        lambda s: s.management("POST", "/dashboard/predictions/raising", data=BODY),
        503,
    ),
    "gRPC, a handler raises": (
        lambda s: grpc_status(partial(s.client.predict, "raising", BODY)),
        "UNAVAILABLE",
    ),
    "gRPC, no worker": (lambda s: grpc_status(partial(s.client.predict, "idle", BODY)), "INTERNAL"),
    "gRPC, no such model": (
        lambda s: grpc_status(partial(s.client.predict, "no", BODY)),
        "INTERNAL",
    ),
    "gRPC, a stream": (
        lambda s: grpc_status(partial(s.client.stream, "raising", BODY)),
        "UNAVAILABLE",
    ),
    "gRPC, a workflow": (
        lambda s: grpc_status(partial(s.client.predict, "flow", BODY)),
        "INTERNAL",
    ),
    "gRPC, tensors": (
        lambda s: grpc_status(
            partial(
                s.client.call,
                "open_inference",
                "ModelInfer",
                model_name="raising",
                inputs=[{"name": "x", "datatype": "UINT8", "shape": [1]}],
                raw_input_contents=[BODY],
            )
        ),
        "INVALID_ARGUMENT",
    ),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_no_body_stays_in_memory(server, kind):
    fail, status = FAILURES[kind]
    count = 3 if kind == "a worker dies" else REQUESTS
    process = psutil.Process(server.process.pid)

    def ask():
        answer = fail(server)
        assert getattr(answer, "status_code", answer) == status, getattr(answer, "text", answer)

    ask()
    before = process.memory_info().rss
    for _ in range(count):
        ask()
    assert process.memory_info().rss - before < min(LEFT, count - 1) * SIZE


def test_a_stream_that_breaks_leaves_no_body(server):
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    for _ in range(REQUESTS):
        with contextlib.suppress(Exception):
            server.predict("streaming", data=BODY)
    assert process.memory_info().rss - before < LEFT * SIZE
