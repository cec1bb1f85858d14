"""GET /ready?model=: what a balancer is told of one model before it sends a request."""

import pytest

pytestmark = pytest.mark.integration


def ready(server, name, **query):
    return server.inference("GET", "/ready", params={"model": name, **query})


def test_a_full_queue_is_told_to_balancers_and_to_clients(
    server, handlers, gate, background, wait_for
):
    server.install(handlers / "lab.py", "queued", job_queue_size=2)
    assert ready(server, "queued").json() == {"status": "Ready", "model": "queued"}
    held = [background(server.ask, "queued", gate=gate.path)]
    gate.wait_entered()
    held += [background(server.ask, "queued") for _ in range(2)]
    server.wait_queued("queued", 2)
    full = ready(server, "queued", version="1.0")
    assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    assert full.json()["status"] == "Full"
    assert full.json()["reason"] == "Nearly all places to wait are taken."
    refused = server.ask("queued")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["type"] == "ServiceUnavailableException"
    assert server.inference("GET", "/ready").status_code == 200
    gate.open()
    assert [each.result().status_code for each in held] == [200] * 3
    assert ready(server, "queued").status_code == 200


SLOW = """
import time
def handle(data, context):
    time.sleep(0.2)
    return ["done"] * len(data or [])
"""


def test_a_model_that_would_miss_its_goal_is_full_until_it_has_caught_up(
    server, background, wait_for
):
    server.install(SLOW, "slow", batch_size=1, max_latency_ms=1000)
    for _ in range(3):
        assert server.ask("slow").status_code == 200
    held = [background(server.ask, "slow") for _ in range(5)]
    late = "An answer would take about as long as max_latency_ms=1000."
    wait_for(lambda: ready(server, "slow").json().get("reason") == late)
    wait_for(lambda: ready(server, "slow").status_code == 200)
    assert {each.result().status_code for each in held} <= {200, 503}


def test_of_an_unknown_model_nothing_is_told(server):
    missing = ready(server, "nobody")
    assert (missing.status_code, missing.json()["type"]) == (404, "ModelNotFoundException")
