"""How many requests in flight the server asks for, and what comes of it."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

# It sleeps, so that its cost is known whatever else the machine does.
KNOWN_COST = """
import time
def handle(data, context):
    if data is not None:
        time.sleep(0.020 + 0.002 * len(data))
        return ["done"] * len(data)
"""
ENOUGH = 0.95
ROUNDS = 3  # a busy machine may spoil one


@pytest.fixture
def throughputs(server, tmp_path):
    def measure(name, clients):
        """Answers per second with each number of clients that wait for their answers."""
        report = tmp_path / "report.json"
        listeners = {"": "inference", "management-": "management", "metrics-": "metrics"}
        urls = [
            f"--{kind}url=http://127.0.0.1:{server.ports[listener]}"
            for kind, listener in listeners.items()
        ]
        how = ["--seconds=1", "--warm-up=0.5", f"--json={report}", "--no-progress"]
        numbers = f"--clients={','.join(map(str, clients))}"
        program = [sys.executable, "-m", "marserve.frontend", "bench", name]
        subprocess.run([*program, *urls, *how, numbers], check=True, capture_output=True)
        runs = [point["runs"][0] for point in json.loads(report.read_text())["points"]]
        return [run["answers"] / run["seconds"] for run in runs]

    return measure


def optimum(server, name):
    return server.describe(name)["batching"].get("optimalNumberOfRequests")


@pytest.mark.parametrize("workers", [1, 2])
def test_as_many_clients_as_it_says_get_nearly_all_of_the_throughput(
    server, install, throughputs, workers
):
    name = install("", KNOWN_COST, batch_policy="adaptive", batch_size=8, initial_workers=workers)
    throughputs(name, [32 * workers])  # it learns what batches cost
    said = optimum(server, name)
    assert said == 16 * workers
    for _ in range(ROUNDS):
        few, enough, *more = throughputs(name, [said // 8, said, 2 * said, 3 * said])
        if enough >= ENOUGH * max(more) > few:
            return
    pytest.fail(f"{few}, {enough}, {more} requests per second")


def test_what_it_says_follows_settings_workers_and_costs(server, install):
    name = install("", KNOWN_COST, batch_size=6)
    assert optimum(server, name) == 12
    server.management("PUT", f"/models/{name}?min_worker=3&synchronous=true")
    assert optimum(server, name) == 36
    server.management("PUT", f"/models/{name}?job_queue_size=10")
    assert optimum(server, name) == 28  # there are seats for no more to wait
    for clients, expected in ((40, 28), (20, 20), (4, 4), (0, 28)):
        server.management("PUT", f"/models/{name}?num_requests={clients}")
        assert optimum(server, name) == expected
    server.management("PUT", f"/models/{name}?batch_size=auto&batch_policy=greedy")
    assert optimum(server, name) is None
    server.management("PUT", f"/models/{name}?min_worker=0&batch_size=4&synchronous=true")
    assert optimum(server, name) == 0


def test_a_model_that_gains_nothing_by_batches_wants_none(server, make_archive):
    source = KNOWN_COST.replace("0.020 + 0.002", "0.000 + 0.040")
    archive = make_archive(server.store, source, "linear", "sampleInput: MAR-INF/MANIFEST.json\n")
    register = {"batch_size": 16, "batch_policy": "adaptive", "initial_workers": 1}
    assert server.register(archive, **register).status_code == 200
    assert optimum(server, "linear") == 2


def test_batches_that_are_outstanding_count(server, install):
    name = install("outstandingBatches: 3\n", KNOWN_COST, batch_size=4)
    assert optimum(server, name) == 16
