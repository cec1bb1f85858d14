"""Requests of alike lengths share batches; what handlers say of lengths, and what they do wrong."""

import pytest

pytestmark = pytest.mark.integration

# A body that is a path is read: so the worker waits at a gate.
HANDLER = """
import os, time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    bodies = [bytes(row["body"]) for row in data]
    if bodies[0].startswith(b"/"):
        return [Path(bodies[0].decode()).read_text()]
    return [",".join(str(len(body)) for body in bodies)] * len(bodies)
"""
HOSTILE = {
    "raises": "raise RuntimeError('no length')",
    "exits": "raise SystemExit(3)",
    "is negative": "return -5",
    "is text": "return 'long'",
    "is not a number": "return float('nan')",
    "is infinite": "return float('inf')",
    "is nothing": "return None",
    "is many": "return [1, 2, 3]",
    "hangs": "time.sleep(600)",
    "spoils its row": "row.clear(); return 1 / 0",
}


@pytest.fixture
def serve(server, install, tmp_path):
    """Register a handler whose batches are formed by length."""

    def make(text=HANDLER, config="", **query):
        path = tmp_path / "handler.py"
        path.write_text(text)
        settings = {"batch_size": 8, "batch_policy": "greedy", "batch_bucket_by": "length"}
        return install(config, handler=path, **{**settings, **query})

    return make


def send(server, name, length):
    return server.predict(name, data=b"x" * length)


def behind_a_gate(server, background, gate, name, lengths):
    """Send requests of these lengths while the worker is busy; the lengths in each one's batch."""
    first = background(server.predict, name, data=gate.path)
    gate.wait_entered()
    rest = []
    for count, length in enumerate(lengths, 1):
        rest.append(background(send, server, name, length))
        server.wait_queued(name, count)
    gate.open()
    assert first.result().status_code == 200
    return [answer.result().text for answer in rest]


def test_alike_lengths_share_a_batch(server, background, make_gate, serve):
    name = serve()
    answers = behind_a_gate(server, background, make_gate(), name, [10, 5000, 11, 5001])
    assert answers == ["10,11", "5000,5001", "10,11", "5000,5001"]
    last = server.management("GET", f"/models/{name}/batches").json()["batches"][-1]
    assert (last["longest"], last["paddingShare"]) == (5001, 0.0)
    lengths = server.describe(name)["batching"]["lengths"]
    assert lengths["isActive"]
    assert lengths["why"] == "batchBucketBy is length"
    assert "inputLength" not in lengths
    assert server.describe(name)["batchBucketBy"] == "length"


def test_it_is_changed_while_the_model_is_served(server, background, make_gate, serve):
    name = serve(batch_bucket_by="none")
    answers = behind_a_gate(server, background, make_gate(), name, [10, 5000, 11])
    assert answers == ["10,5000,11"] * 3
    assert "lengths" not in server.describe(name)["batching"]
    changed = server.management("PUT", f"/models/{name}", params={"batch_bucket_by": "length"})
    assert changed.status_code == 200
    assert changed.json()["status"].endswith("batch_bucket_by=length")
    answers = behind_a_gate(server, background, make_gate(), name, [10, 5000, 11])
    assert answers == ["10,11", "5000", "10,11"]


def test_under_the_adaptive_policy_it_is_found_out(server, serve):
    name = serve(batch_policy="adaptive", batch_bucket_by=None)
    assert server.describe(name)["batchBucketBy"] == "auto"
    assert send(server, name, 10).status_code == 200
    lengths = server.describe(name)["batching"]["lengths"]
    assert (lengths["isActive"], lengths["why"]) == (False, "learning")


@pytest.mark.parametrize("spelled", ["batchBucketBy", "batch_bucket_by"])
def test_the_archive_may_ask_for_it(server, serve, spelled):
    name = serve(config=f"{spelled}: length\n", batch_bucket_by=None)
    assert server.describe(name)["batchBucketBy"] == "length"


@pytest.mark.parametrize("mode", ["continuousBatching", "sequenceBatching"])
def test_where_there_is_no_choice_it_is_refused(server, make_archive, handlers, mode):
    config = f"{mode}: true\nsequenceMaxIdleMSec: 1000\nbatchBucketBy: length\n"
    archive = make_archive(server.store, handlers / "lab.py", f"by-length-{mode}", config)
    answer = server.register(archive)
    assert answer.status_code == 400
    assert f"batch_bucket_by=length has no meaning beside {mode}" in answer.json()["message"]


def test_what_a_handler_says_of_lengths_is_learnt(server, serve):
    text = f"{HANDLER}\ndef input_length(row):\n    return min(len(row['body']), 300) / 3\n"
    name = serve(text)

    def is_learnt():
        for length in range(10, 1000, 30):
            assert send(server, name, length).text == str(length)
        return server.describe(name)["batching"]["lengths"]["inputLength"]["isUsed"]

    for _ in range(20):
        if is_learnt():
            break
    told = server.describe(name)["batching"]["lengths"]["inputLength"]
    assert told["isUsed"]
    assert told["failures"] == 0
    assert told["explained"] > 0.5


@pytest.mark.parametrize("nonsense", HOSTILE.values(), ids=HOSTILE)
def test_no_request_is_lost_by_what_input_length_does(server, serve, nonsense):
    name = serve(f"{HANDLER}\ndef input_length(row):\n    {nonsense}\n")
    for length in (10, 20, 30):
        assert send(server, name, length).text == str(length)
    told = server.describe(name)["batching"]["lengths"]["inputLength"]
    assert told["failures"] == 1
    assert told["why"] == "input_length has failed so far; the model's log has its errors"
    server.wait_logged("model_log.log", "input_length")
    counted = server.metrics("marserve_failed_input_lengths_total")
    assert [count for series, count in counted.items() if name in series] == [1.0]


def test_what_input_length_takes_is_no_cost_of_the_batch(server, serve):
    text = f"{HANDLER}\ndef input_length(row):\n    time.sleep(0.9)\n    return 1\n"
    name = serve(text, batch_policy="adaptive", max_latency_ms=400)
    assert [send(server, name, 10).status_code for _ in range(5)] == [200] * 5
