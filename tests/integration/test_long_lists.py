"""Lists with more items than the queue has capacity for: they are queued piece by piece."""

import json
import os
import signal

import numpy as np
import pytest
import requests
from grpc_client import connected
from infer_client import CUT, arrays_in, infer, numbered

from marserve.frontend.grpc.messages import load_proto

pytestmark = pytest.mark.integration

MESSAGES = load_proto("open_inference.proto").messages
JSON = "application/json"
LISTS = "dynamicBatchSize: true\n"
MANY = 2048  # inputs that a client of embeddings sends; jobQueueSize is 100
EMBED = """
def handle(data, context):
    if data is None:
        return None
    texts = [row["body"] for row in data]
    return [{"embedding": [float(len(text))], "tokens": 1} for text in texts]
"""
RERANK = """
def handle(data, context):
    return data and [float(len(row["body"]["document"])) for row in data]
"""
DOUBLE = """
import numpy as np

def handle(data, context):
    inputs = [row["body"]["inputs"][0] for row in data or []]
    return data and [2 * np.asarray(x["data"], "float32").reshape(x["shape"]) for x in inputs]
"""
ECHO = """
def handle(data, context):
    return data and [row["body"] for row in data]
"""


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(ts_open_inference_protocol="true") as shared:
        yield shared


@pytest.fixture
def items(gate, record):
    """Return items for the lab, of which the first waits at the gate."""

    def make(count, name="row"):
        made = [{"id": f"{name}-{number}", "record": str(record)} for number in range(count)]
        made[0]["gate"] = gate.path
        return made

    return make


# -- every way to send a list ----------------------------------------------------------------------


def test_an_embedding_client_sends_2048_texts(server, install):
    name = install("openai: embeddings\n", handler=EMBED, batch_size=32)
    texts = ["x" * (number % 7) for number in range(MANY)]
    document = {"model": name, "input": texts}
    answer = server.inference("POST", "/v1/embeddings", json=document)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["embedding"][0] for each in data] == [len(text) for text in texts]
    assert answer.json()["usage"]["prompt_tokens"] == MANY


def test_documents_beyond_the_capacity_are_ranked(server, install):
    name = install("openai: rerank\n", handler=RERANK, batch_size=32)
    documents = ["x" * number for number in range(300)]
    document = {"model": name, "query": "q", "documents": documents, "top_n": 2}
    answer = server.inference("POST", "/v1/rerank", json=document)
    assert answer.status_code == 200, answer.text
    assert [each["index"] for each in answer.json()["results"]] == [299, 298]


@pytest.mark.parametrize("policy", ["fixed", "greedy", "adaptive", "fixed_or_single"])
def test_an_array_beyond_the_capacity_is_answered_in_order(server, install, policy):
    name = install(LISTS, handler=ECHO, batch_size=8, batch_policy=policy, initial_workers=2)
    for wanted in ([*range(101)], [*range(1000)]):
        assert server.predict(name, json=wanted).json() == wanted


def test_instances_and_files_beyond_the_capacity_are_answered(server, install):
    name = install(LISTS, handler=ECHO, batch_size=8)
    document = {"instances": [*range(300)]}
    answer = server.inference("POST", f"/v1/models/{name}:predict", json=document)
    assert answer.json() == {"predictions": [*range(300)]}
    files = [("data", (f"{number}", b"%d" % number, JSON)) for number in range(300)]
    assert server.predict(name, files=files).json() == [*range(300)]


def test_rows_of_tensors_beyond_the_capacity_are_answered(server, install):
    name = install(CUT, handler=DOUBLE, batch_size=8, max_batch_delay=0)
    x = numbered(MANY)
    np.testing.assert_array_equal(arrays_in(infer(server, name, x))["output-0"], 2 * x)
    tensor = {"name": "x", "datatype": "FP32", "shape": [MANY, 2], "data": x.ravel().tolist()}
    answer = server.inference("POST", f"/v2/models/{name}/infer", json={"inputs": [tensor]})
    assert answer.json()["outputs"][0]["data"] == (2 * x).ravel().tolist()
    request = MESSAGES.ModelInferRequest(model_name=name, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=[MANY, 2])
    with connected(server) as client:
        response = client.method("open_inference", "ModelInfer")(request, timeout=60)
    found = np.frombuffer(response.raw_output_contents[0], "float32").reshape(MANY, 2)
    np.testing.assert_array_equal(found, 2 * x)


# -- beside others ---------------------------------------------------------------------------------


def test_other_requests_find_places_and_do_not_wait_for_all_of_a_list(
    server, install, background, gate, record, items
):
    name = install(f"{LISTS}jobQueueSize: 4\n", batch_size=1)
    answer = background(server.predict, name, json=items(30))
    gate.wait_entered()
    server.wait_queued(name, 2)  # half of the capacity
    singles = []
    for number in (3, 4):
        singles.append(background(server.ask, name, id="single", record=str(record)))
        server.wait_queued(name, number)
    refused = server.ask(name)
    assert (refused.status_code, "queue is full" in refused.json()["message"]) == (503, True)
    gate.open()
    assert [single.result().status_code for single in singles] == [200, 200]
    assert len(answer.result().json()) == 30
    order = record.read_text().split()
    # Two rows were queued before them, and one is sent to the worker while the gate opens.
    assert max(place for place, id_ in enumerate(order) if id_ == "single") <= 6


def test_long_lists_take_turns(server, install, background, gate, record, items, wait_for):
    name = install(f"{LISTS}jobQueueSize: 4\n", batch_size=1)
    first = background(server.predict, name, json=items(20, "a"))
    gate.wait_entered()
    server.wait_queued(name, 2)
    second = background(server.predict, name, json=items(20, "b")[1:])
    # The rows that are not queued: 17 of the first, all of the second.
    wait_for(lambda: server.describe(name)["batching"]["rowsOfLongLists"] == 17 + 19)
    gate.open()
    assert (len(first.result().json()), len(second.result().json())) == (20, 19)
    order = [id_[0] for id_ in record.read_text().split()]
    assert abs(order[:20].count("a") - order[:20].count("b")) <= 4


def test_a_list_has_half_of_the_places_of_its_priority(server, install, background, gate, items):
    name = install(f"{LISTS}jobQueueSize: 4\npriorityQueueSizes: {{low: 2}}\n", batch_size=1)
    low = {"headers": {"X-Priority": "low"}}
    answer = background(server.predict, name, json=items(9), **low)
    gate.wait_entered()
    server.wait_queued(name, 1)
    assert server.describe(name)["jobQueueStatus"]["remainingCapacity"] == 4
    single = background(server.predict, name, json={}, **low)
    server.wait_queued(name, 2)
    assert server.predict(name, json={}, **low).status_code == 503
    gate.open()
    assert len(answer.result().json()) == 9
    assert single.result().status_code == 200


def test_a_list_needs_one_ticket(server, install, background, gate, items):
    name = install(f"{LISTS}useJobTicket: true\njobQueueSize: 4\n", batch_size=2)
    answer = background(server.predict, name, json=items(9))
    gate.wait_entered()
    assert server.predict(name, json=[{}] * 9).status_code == 503
    gate.open()
    assert len(answer.result().json()) == 9
    assert server.predict(name, json=[{}] * 9).status_code == 200


# -- an end in the middle --------------------------------------------------------------------------


@pytest.fixture
def begun(server, install, background, gate, items):
    """A model with a queue of 4 that has begun a list of 30 items."""
    name = install(f"{LISTS}jobQueueSize: 4\n", batch_size=1)

    def begin(**kwargs):
        answer = background(server.predict, name, json=items(30), **kwargs)
        gate.wait_entered()
        server.wait_queued(name, 2)
        return answer

    return name, begin


def assert_nothing_follows(server, name, record):
    server.wait_queued(name, 0)
    status = server.describe(name)["jobQueueStatus"]
    assert (status["remainingCapacity"], status["pendingRequests"]) == (4, 0)
    assert server.ask(name).status_code == 200
    assert record.read_text().split() == ["row-0"]


def test_a_client_that_leaves_ends_a_long_list(server, begun, gate, record, items, wait_for):
    name, _ = begun
    body = json.dumps(items(30)).encode()
    with server.connect("inference") as connection:
        connection.sendall(
            b"POST /predictions/%b HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (name.encode(), len(body), body)
        )
        gate.wait_entered()
        server.wait_queued(name, 2)
    server.wait_queued(name, 0)
    gate.open()
    assert_nothing_follows(server, name, record)
    wait_for(lambda: not any(server.metrics("marserve_bytes_in_flight").values()))


def test_a_deadline_ends_a_long_list(server, begun, gate, record):
    name, begin = begun
    answer = begin(headers={"X-Timeout-Ms": "1000"}).result()
    assert (answer.status_code, answer.json()["type"]) == (504, "RequestTimeoutException")
    server.wait_queued(name, 0)
    gate.open()
    assert_nothing_follows(server, name, record)


def test_an_item_that_is_refused_ends_a_long_list(server, install, record):
    name = install(f"{LISTS}jobQueueSize: 4\n", batch_size=1)
    rows = [{"id": number, "record": str(record)} for number in range(200)]
    rows[15]["status"] = [422, "Refused"]
    answer = server.predict(name, json=rows)
    assert (answer.status_code, answer.headers["x-failed-item"]) == (422, "15")
    assert server.ask(name).status_code == 200
    assert len(record.read_text().split()) <= 20


def test_a_worker_that_dies_does_not_end_a_long_list(server, begun, gate, record):
    name, begin = begun
    answer = begin()
    os.kill(server.worker(name)["pid"], signal.SIGKILL)
    gate.open_for_all()
    assert len(answer.result().json()) == 30
    assert set(record.read_text().split()) == {f"row-{number}" for number in range(30)}
    server.wait_queued(name, 0)


def is_refused(server, name):
    try:
        answer = server.predict(name, json={}, timeout=0.3)
    except requests.Timeout:  # it was queued, and leaves the queue with its client
        return False
    return answer.status_code in (404, 503)


@pytest.mark.parametrize(
    ("method", "query"), [("DELETE", ""), ("PUT", "?min_worker=0&synchronous=true")]
)
def test_a_model_that_is_leaving_finishes_a_long_list(
    server, begun, background, gate, wait_for, method, query
):
    name, begin = begun
    answer = begin()
    leaving = background(server.management, method, f"/models/{name}{query}")
    wait_for(lambda: is_refused(server, name))
    gate.open()
    assert len(answer.result().json()) == 30
    assert leaving.result().status_code == 200


def test_a_stop_that_takes_too_long_ends_a_long_list(start_server, handlers, background, items):
    with start_server(drain_timeout="1") as server:
        server.install(handlers / "lab.py", "m", f"{LISTS}jobQueueSize: 4\n", batch_size=1)
        answer = background(server.predict, "m", json=items(30))
        server.wait_queued("m", 2)
        server.terminate()
        assert answer.result().status_code in (500, 503)
        server.wait_stopped()


def test_a_list_that_takes_more_memory_than_the_limit_is_refused_for_good(start_server):
    with start_server(max_bytes_in_flight="1000000", max_request_size="1000000") as server:
        server.install(ECHO, "m", LISTS, batch_size=8)
        rows = [*range(200)]
        assert server.predict("m", json=rows).json() == rows
        answer = server.predict("m", json=[0] * 2000)
        assert answer.status_code == 413
        assert "max_bytes_in_flight (1000000 bytes)" in answer.json()["message"]
        assert "retry-after" not in answer.headers
        assert server.predict("m", json=rows).json() == rows
