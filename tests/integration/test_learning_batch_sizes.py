"""Batch sizes that are learnt while a model serves: by exploration, and in idle moments."""

import os
import signal
import time

import pytest
from servers import wait_for

pytestmark = pytest.mark.integration

#: Batches of more than 16 take several times as long. There is no sample to try sizes with.
CLIFF = """
import time
def handle(data, context):
    if data is not None:
        n = len(data)
        time.sleep(0.06 + 0.003 * n + (0.3 if n > 16 else 0))
        return [n] * n
"""
#: Writes what it runs into a file; samples wait at a gate, requests do not.
SAMPLED = """
from pathlib import Path
class Sampled:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        body = data[0].get("data") or data[0].get("body")
        is_sample = isinstance(body, dict)
        with open({log!r}, "a") as log:
            log.write(f"{{'sample' if is_sample else 'request'}} {{len(data)}}\\n")
        if is_sample:
            Path(body["gate"]).read_text()
        return ["done"] * len(data)
    def sample_input(self):
        return {{"gate": {gate!r}}}
"""


@pytest.fixture
def sampled(server, gate, tmp_path):
    """Install a model that has a sample and serves one request at a time; returns what it ran."""
    log = tmp_path / "log"
    log.touch()
    server.install(SAMPLED.format(log=str(log), gate=gate.path), "sampled")
    yield lambda: log.read_text().splitlines()
    server.management("DELETE", "/models/sampled")


def switch_on(server, **query):
    params = {"max_latency_ms": 1000, "batch_size": 8, **query}
    answer = server.management("PUT", "/models/sampled", params=params)
    assert answer.status_code == 200, answer.text


def batching(server, name):
    return server.describe(name)["batching"]


def test_under_load_a_model_that_nobody_measured_finds_its_size(server, background):
    server.install(
        CLIFF, "steep", max_latency_ms=5000, batch_size=32, max_batch_delay=0, job_queue_size=200
    )
    until = time.monotonic() + 90

    def client():
        answers = 0
        while time.monotonic() < until:
            answers += server.predict("steep", data="x").status_code == 200
        return answers

    clients = [background(client) for _ in range(48)]
    try:
        described = wait_for(
            lambda: (now := batching(server, "steep"))["size"] <= 16 and now,
            seconds=60.0,
            what=lambda: batching(server, "steep"),
        )
    finally:
        until = 0
    assert described["size"] >= 8
    assert described["why"] == "larger batches have less throughput"
    assert all(each.result() for each in clients)
    batches = server.management("GET", "/models/steep/batches").json()["batches"]
    assert "exploration" in {each["reason"] for each in batches}
    server.management("DELETE", "/models/steep")


def test_a_goal_that_is_set_later_is_prepared_for_in_an_idle_moment(server, gate, sampled):
    switch_on(server)
    assert batching(server, "sampled")["profiling"] == [1, 2, 3, 4, 6, 8]
    gate.open_for_all()
    described = wait_for(
        lambda: (now := batching(server, "sampled")).get("profiling") is None and now,
        what=lambda: (batching(server, "sampled"), sampled()),
    )
    assert [each["size"] for each in described["costs"]["points"]][:2] == [1, 2]
    assert sampled()[:5] == ["sample 1"] * 4 + ["sample 2"]
    server.wait_logged("ts_log.log", "sampled_1.0: batch sizes profiled while idle: 1 in ")


def test_a_request_waits_for_one_run_at_most(server, background, gate, sampled):
    switch_on(server)
    gate.wait_entered()
    request = background(server.predict, "sampled", data="x")
    server.wait_queued("sampled", 1)
    gate.open_for_all()
    assert request.result().status_code == 200
    assert sampled()[:2] == ["sample 1", "request 1"]
    wait_for(lambda: batching(server, "sampled").get("profiling") is None)
    assert sampled().count("request 1") == 1


def test_other_workers_serve_meanwhile(server, gate, sampled):
    answer = server.management(
        "PUT", "/models/sampled", params={"min_worker": 2, "synchronous": "true"}
    )
    assert answer.status_code == 200
    switch_on(server)
    gate.wait_entered()
    for _ in range(3):
        assert server.predict("sampled", data="x").status_code == 200
    assert sampled() == ["sample 1"] + ["request 1"] * 3
    gate.open_for_all()


def test_a_worker_that_is_killed_over_a_sample_harms_nobody(server, background, gate, sampled):
    switch_on(server)
    gate.wait_entered()
    request = background(server.predict, "sampled", data="x")
    server.wait_queued("sampled", 1)
    os.kill(server.worker("sampled")["pid"], signal.SIGKILL)
    assert request.result().status_code == 200
    server.wait_logged("ts_log.log", "while idle: none - the worker has ended meanwhile")
    assert batching(server, "sampled").get("profiling") is None
    assert sampled() == ["sample 1", "request 1"]


def test_without_a_sample_the_traffic_is_all_there_is_to_learn_from(server):
    server.install(CLIFF, "unsampled", max_batch_delay=0)
    answer = server.management("PUT", "/models/unsampled", params={"batch_size": "auto"})
    assert answer.status_code == 200
    server.wait_logged("ts_log.log", "while idle: none - there is no sample input")
    assert server.predict("unsampled", data="x").status_code == 200
    server.management("DELETE", "/models/unsampled")
