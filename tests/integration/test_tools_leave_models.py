"""Tools leave the models of a server as they were: what is set, by whom, and what follows from it.

Each tool is run on one of two equal models; later changes must do the same to both.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from servers import make_archive, wait_for

from marserve.frontend.configuration.model_schema import REGISTERED
from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.main import main as bench
from marserve.tools.bench.measurement import Point
from marserve.tools.bench.model_server import ModelServer
from marserve.tools.bench.settings import served_settings

pytestmark = pytest.mark.integration

MARSERVE = Path(sys.executable).with_name("marserve")
ECHO = """
def handle(data, context):
    return data and [row['body'] for row in data]
def other(data, context):
    return data and ['other'] * len(data)
"""
#: Each setting of a registration, with another value than its default.
ALL = {
    "performance_hint": "latency",
    "allow_auto_batching": "false",
    "batchable": "true",
    "batch_size": 4,
    "max_batch_delay": 7,
    "batch_policy": "adaptive",
    "max_latency_ms": 9000,
    "num_requests": 3,
    "compiled_batch_sizes": "1,2,4",
    "job_queue_size": 77,
    "batch_bucket_by": "length",
    "dynamic_batch_size": "true",
    "response_timeout": 33,
    "startup_timeout": 44,
    "validate_batching": "warn",
    "validate_batching_tolerance": 0.5,
    "outstanding_batches": 2,
    "torch_threads": 1,
    "torch_wait_policy": "passive",
}
YAML = """
batchSize: 3
maxBatchDelay: 9
maxLatencyMs: 8000
numRequests: 2
jobQueueSize: 66
responseTimeout: 55
torchThreads: 1
outstandingBatches: 2
minWorkers: 2
maxWorkers: 3
"""
#: What was set before a tool comes: by model-config.yaml, the registration and later changes.
MODELS = {
    "nothing": ("", {}, []),
    "all": ("", ALL, []),
    "all in the archive": (YAML, {}, []),
    "some in each": (YAML, {"batch_policy": "greedy", "num_requests": 5}, [{"batch_size": 6}]),
    "the default": ("", {"batch_size": 1, "batch_policy": "fixed", "job_queue_size": 100}, []),
    "a hint": ("performanceHint: latency\n", {"performance_hint": "throughput"}, []),
    "against each other": ("", {}, [{"batchable": "false"}, {"batch_size": 4}]),
    "another handler": ("", {"handler": "handler.py:other", "runtime": "python3"}, []),
}
LATER = (
    {"max_latency_ms": 9500},
    {"batch_policy": "greedy"},
    {"performance_hint": "none"},
    {"batch_policy": "adaptive"},
)
SHORT = ("--requests", "8", "--warm-up", "0", "--clients", "2", "--no-progress")
BENCHES = (
    ("--performance-hint", "none,latency,throughput"),
    ("--max-latency-ms", "5000", "--batch-policy", "fixed,adaptive"),
    ("--batch-size", "1,2", "--max-batch-delay", "0,1", "--workers", "1,2"),
    ("--torch-threads", "1,2", "--batch-policy", "greedy"),
)
#: Facts about the present, not settings.
MEASURED = {"modelName", "workers", "jobQueueStatus", "batching", "batchSize", "warnings"}


def test_each_setting_of_a_registration_is_set():
    assert {row.parameter for row in REGISTERED} == ALL.keys()


def settings(server, name):
    """Return a description without what is measured."""
    described = server.describe(name)
    batching = described["batching"]
    of_batching = {key: batching[key] for key in ("isAutomatic", "windowMs")}
    size = "auto" if batching["isAutomatic"] else described["batchSize"]
    kept = {key: value for key, value in described.items() if key not in MEASURED}
    return {**kept, **of_batching, "batchSize": size}


@pytest.fixture
def make_twins(server, request):
    """Make two models with the same settings."""
    made = []

    def make(config, registered, changes):
        names = [f"twin-{abs(hash(request.node.name))}-{number}" for number in range(2)]
        for name in names:
            archive = make_archive(server.store, ECHO, name, config)
            made.append(name)
            answer = server.register(archive, **{"initial_workers": 1, **registered})
            assert answer.status_code == 200, answer.text
            for change in changes:
                assert server.management("PUT", f"/models/{name}", params=change).status_code == 200
        assert_equal(server, *names)
        return names

    yield make
    for name in made:
        server.management("DELETE", f"/models/{name}")


def assert_equal(server, one, other):
    # Their archives have the names of the models.
    first, second = ({**settings(server, name), "modelUrl": ""} for name in (one, other))
    assert first == second


def assert_later_changes_do_the_same(server, one, other):
    for change in LATER:
        for name in (one, other):
            answer = server.management("PUT", f"/models/{name}", params=change)
            assert answer.status_code == 200, answer.text
        assert_equal(server, one, other)


def urls(server):
    named = {"url": "inference", "management-url": "management", "metrics-url": "metrics"}
    for option, listener in named.items():
        yield from (f"--{option}", f"http://127.0.0.1:{server.ports[listener]}")


def run(server, *command):
    """Run a program in the directory of a server; return its status and output."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=server.directory,
        env=server.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("model", MODELS)
def test_bench_leaves_a_model_as_it_was(server, make_twins, model):
    one, other = make_twins(*MODELS[model])
    before = settings(server, one)
    for options in BENCHES:
        assert bench([one, *SHORT, *options, *urls(server)]) == 0
        assert settings(server, one) == before
    assert_later_changes_do_the_same(server, one, other)


@pytest.mark.parametrize(
    "option",
    [
        {"performance_hint": "latency"},
        {"performance_hint": "Throughput"},
        {"max_latency_ms": 5000},
        {"batch_policy": "adaptive"},
        {"batch_policy": "greedy"},
    ],
)
@pytest.mark.parametrize("model", ["nothing", "some in each"])
def test_a_point_of_bench_is_what_a_change_of_its_options_makes(server, make_twins, model, option):
    one, other = make_twins(*MODELS[model])
    with served_settings(client_of(server, one)) as points:
        points.set(Point(batch_size=7, max_batch_delay_ms=3))
        points.set(Point(**option))
        assert server.management("PUT", f"/models/{other}", params=option).status_code == 200
        assert_equal(server, one, other)


def test_a_goal_that_is_refused_meanwhile_is_told_and_all_else_is_put_back(
    server, make_archive, tmp_path
):
    pause = tmp_path / "pause"
    pause.write_text("0")
    slow = f"""
import time
def handle(data, context):
    if data:
        time.sleep(float(open({str(pause)!r}).read()))
        return [1] * len(data)
"""
    archive = make_archive(server.store, slow, "slower")
    query = {"max_latency_ms": 50, "job_queue_size": 66, "batch_size": 3}
    assert server.register(archive, initial_workers=1, **query).status_code == 200

    def measure():
        with served_settings(client_of(server, "slower")) as points:
            points.set(Point(batch_policy="greedy", workers=2, batch_size=2))
            pause.write_text("0.1")
            wait_for(lambda: answered_in(server, "slower") > 60)

    with pytest.raises(BenchError) as raised:
        measure()
    assert "max_latency_ms=50: a single request takes " in str(raised.value)
    assert str(raised.value).endswith(" slower has max_latency_ms=0 instead of 50.")
    described = server.describe("slower")
    kept = ("jobQueueSize", "batchSize", "minWorkers", "batchPolicy")
    assert [described[key] for key in kept] == [66, 3, 1, "adaptive"]
    server.management("DELETE", "/models/slower")


def answered_in(server, name):
    """Return the milliseconds that a request is expected to take after another one."""
    assert server.predict(name, json=1).status_code == 200
    costs = server.describe(name)["batching"]["costs"]
    return costs["points"][0]["meanMs"] if costs else 0


def client_of(server, name):
    listeners = ("inference", "management", "metrics")
    clients = [
        Client(Destination(f"http://127.0.0.1:{server.ports[listener]}"), {}, 60)
        for listener in listeners
    ]
    return ModelServer(*clients, name, "")


@pytest.mark.parametrize("options", [("--tune", "5000", "--batch-size", "2"), ("--validate",)])
def test_bench_that_searches_or_validates_leaves_a_model_as_it_was(server, make_twins, options):
    one, other = make_twins(*MODELS["some in each"])
    before = settings(server, one)
    short = ("--requests", "8", "--warm-up", "0", "--no-progress")
    bench([one, *short, *options, *urls(server)])  # it may find no answer
    assert settings(server, one) == before
    assert_later_changes_do_the_same(server, one, other)


def test_other_tools_leave_a_model_as_it_was(server, make_twins, tmp_path):
    one, other = make_twins(*MODELS["all"])
    before = server.describe(one)
    management = f"http://127.0.0.1:{server.ports['management']}"
    assert run(server, MARSERVE, "doctor", "--url", management)[0] == 0
    inference = f"http://127.0.0.1:{server.ports['inference']}"
    (tmp_path / "input").write_text("x")
    compare = ("--compare", inference, inference, "--model", one, "--input", tmp_path / "input")
    assert run(server, MARSERVE, "doctor", *compare)[0] == 0
    demo = run(server, MARSERVE, "demo", "--ts-config", "config.properties")
    assert "Failed: A server is already running" in demo[1]
    register = f"from ts import launcher; print(launcher.register_model({one!r}, '{one}.mar'))"
    assert "status_code=409" in run(server, sys.executable, "-c", register)[1]
    after = server.describe(one)
    for described in (before, after):
        del described["workers"], described["batching"]
    assert after == before
    assert_later_changes_do_the_same(server, one, other)


def test_a_node_of_a_workflow_is_not_registered_again(server, install_workflow):
    make_archive(server.store, ECHO, "node")
    workflow = install_workflow(
        "models: {max-workers: 1, m: {url: node.mar}}\ndag: {pre: [m]}\n",
        "def pre(data, context):\n    return data\n",
    )
    name = f"{workflow}__m"
    before = server.describe(name)
    assert before["workflow"] == workflow
    assert bench([name, *SHORT, "--torch-threads", "2", *urls(server)]) == 1
    assert bench([name, *SHORT, "--batch-size", "2", *urls(server)]) == 0
    after = server.describe(name)
    assert (after["workflow"], after["decidedBy"]) == (workflow, before["decidedBy"])
    server.management("DELETE", "/models/node")


def test_the_default_one_of_several_versions_is_not_registered_again(server, capsys):
    for version in ("1.0", "2.0"):
        archive = make_archive(server.store, ECHO, f"twice-{version}", version=version)
        query = {"model_name": "twice", "initial_workers": 1, "batch_size": 2}
        assert server.register(archive, **query).status_code == 200
    before = settings(server, "twice")
    assert bench(["twice", *SHORT, "--torch-threads", "1,2", *urls(server)]) == 1
    told = (
        "The server does not unregister twice: 403 Cannot remove default version for model twice."
    )
    assert capsys.readouterr().err.splitlines()[-1] == f"marserve bench: {told}"
    assert settings(server, "twice") == before
    assert bench(["twice", *SHORT, "--batch-size", "4", *urls(server)]) == 0
    assert settings(server, "twice") == before
    for version in ("2.0", "1.0"):
        assert server.management("DELETE", f"/models/twice/{version}").status_code == 200


RESTART = "from ts import launcher; launcher.start()"


def test_the_launcher_that_starts_the_server_again_leaves_models_as_they_were(prepare_server):
    models = {name.replace(" ", "-"): model for name, model in MODELS.items()}
    with prepare_server(default_workers_per_model="1") as server:
        assert run(server, sys.executable, "-c", RESTART)[0] == 0
        for name, (config, registered, changes) in models.items():
            make_archive(server.store, ECHO, name, config)
            assert server.register(f"{name}.mar", **registered).status_code == 200
            for change in changes:
                assert server.management("PUT", f"/models/{name}", params=change).status_code == 200
        before = {name: restored_settings(server, name) for name in models}
        assert run(server, sys.executable, "-c", RESTART)[0] == 0
        assert {name: restored_settings(server, name) for name in models} == before
        run(server, sys.executable, "-c", "from ts import launcher; launcher.stop()")


def restored_settings(server, name):
    """Return the settings as a snapshot restores them: it has the choices of requests."""
    found = settings(server, name)
    decided = {
        key: "request" if origin == "snapshot" else origin
        for key, origin in found["decidedBy"].items()
        if key != "runtime"  # a snapshot always has it
    }
    return {**found, "decidedBy": decided}
