"""Batching as it is set, changed and looked at: registrations, live changes, history, snapshots."""

import json
import re

import jsonschema
import pytest
from servers import wait_for

from marserve.frontend.configuration.properties import parse_properties

pytestmark = pytest.mark.integration

NEVER = 60_000  # ms: a window that no test waits for

#: Takes so many seconds for a batch of n, and has a sample to be tried with.
TIMED = """
import time
class Timed:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        n = len(data)
        time.sleep({seconds})
        return [n] * n
    def sample_input(self):
        return "anything"
"""
ONE_IS_20_MS = TIMED.format(seconds="0.018 + 0.002 * n")


@pytest.fixture
def install(server, install):
    """Install the lab, or another handler, for as long as the test runs; returns its name."""
    names = []

    def make(*config, **query):
        names.append(install(*config, **query))
        return names[-1]

    yield make
    for name in names:
        server.management("DELETE", f"/models/{name}")


@pytest.fixture
def change(server):
    def put(name, **query):
        return server.management("PUT", f"/models/{name}", params=query)

    return put


def batches(server, name):
    answer = server.management("GET", f"/models/{name}/batches")
    assert answer.status_code == 200, answer.text
    return answer.json()["batches"]


def fill(server, background, gate, name, count, **orders):
    """Have requests wait behind one that stands at a gate; their batch sizes, when it is open."""
    first = background(server.ask, name, id="first", gate=gate.path)
    gate.wait_entered()
    rest = [background(server.ask, name, id=i, **orders) for i in range(count)]
    server.wait_queued(name, count)
    gate.open()
    assert first.result().status_code == 200
    return [answer.result().json()["batch"] for answer in rest]


def pids(server, name):
    return [each["pid"] for each in server.describe(name)["workers"]]


def refused(answer):
    assert answer.status_code == 400, answer.text
    assert answer.json()["code"] == 400
    return answer.json()["message"]


# -- live changes ----------------------------------------------------------------------------------


def test_the_next_batch_has_the_new_size_and_workers_stay(
    server, install, change, background, make_gate
):
    name = install(batch_size=2, max_batch_delay=0)
    before = pids(server, name)
    assert fill(server, background, make_gate(), name, 4) == [2, 2, 2, 2]
    answer = change(name, batch_size=4)
    assert answer.status_code == 200
    assert answer.json()["status"] == (
        f"Batching updated for model: {name}: batch_size=4, max_batch_delay=0, "
        "batch_policy=fixed, max_latency_ms=0, num_requests=0, job_queue_size=100, "
        "batch_bucket_by=none"
    )
    assert server.describe(name)["batchSize"] == 4
    assert fill(server, background, make_gate(), name, 4) == [4, 4, 4, 4]
    assert change(f"{name}/1.0", max_batch_size=3).status_code == 200
    assert fill(server, background, make_gate(), name, 3) == [3, 3, 3]
    assert change(name, batch_size=1).status_code == 200
    assert fill(server, background, make_gate(), name, 3) == [1, 1, 1]
    assert pids(server, name) == before


def test_a_window_that_is_shortened_lets_go_who_waits_in_it(server, install, change, background):
    name = install(batch_size=4, max_batch_delay=NEVER)
    waiting = background(server.ask, name, id=1)
    server.wait_queued(name, 1)
    assert change(name, max_batch_delay=0).status_code == 200
    assert waiting.result().json()["batch"] == 1
    assert server.describe(name)["maxBatchDelay"] == 0
    assert server.ask(name, id=2).json()["batch"] == 1
    assert [each["reason"] for each in batches(server, name)] == ["window", "window"]


def test_a_size_that_is_reached_by_who_waits_lets_them_go(server, install, change, background):
    name = install(batch_size=4, max_batch_delay=NEVER)
    waiting = [background(server.ask, name, id=i) for i in range(2)]
    server.wait_queued(name, 2)
    assert change(name, batch_size=2).status_code == 200
    assert [answer.result().json()["batch"] for answer in waiting] == [2, 2]


def test_the_policy_and_the_number_of_clients(server, install, change):
    name = install(batch_size=4, max_batch_delay=NEVER)
    assert change(name, batch_policy="greedy").status_code == 200
    assert server.ask(name, id=1).json()["batch"] == 1
    assert change(name, batch_policy="fixed", num_requests=1).status_code == 200
    assert server.ask(name, id=2).json()["batch"] == 1
    reasons = [each["reason"] for each in batches(server, name)]
    assert reasons[0] == "work_conserving"
    described = server.describe(name)
    assert (described["batchPolicy"], described["numRequests"]) == ("fixed", 1)


def test_seats_in_the_queue(server, install, change, background, gate):
    name = install()
    first = background(server.ask, name, id="first", gate=gate.path)
    gate.wait_entered()
    accepted = [background(server.ask, name, id=1)]
    server.wait_queued(name, 1)
    assert change(name, job_queue_size=1).status_code == 200
    assert server.ask(name, id=2).status_code == 503
    assert server.describe(name)["batching"]["queueBound"] == 1
    assert change(name, job_queue_size=2).status_code == 200
    accepted.append(background(server.ask, name, id=3))
    server.wait_queued(name, 2)
    gate.open()
    assert [answer.result().status_code for answer in (first, *accepted)] == [200] * 3


def test_compiled_sizes_are_padded_for_the_handler_only(server, install, change, together):
    name = install(batch_size=4, max_batch_delay=600)
    assert change(name, compiled_batch_sizes="4").status_code == 200
    answers = together([lambda i=i: server.ask(name, id=i) for i in range(3)])
    assert [answer.json() for answer in answers] == [{"id": i, "batch": 4} for i in range(3)]
    (only,) = batches(server, name)
    assert (only["size"], only["ranAs"]) == (3, 4)
    assert change(name, compiled_batch_sizes="", max_batch_delay=0).status_code == 200
    assert server.ask(name, id=1).json()["batch"] == 1


@pytest.mark.parametrize(
    ("config", "batch_dim", "stack_inputs"),
    [
        ("", None, None),
        ("batchDim: 1\n", None, None),  # it has no effect
        ("dynamicBatchSize: true\n", 0, None),
        ("dynamicBatchSize: true\nbatchDim: [1, 0]\n", [1, 0], None),
        ("stackInputs: true\nbatchDim: 1\n", 1, "numpy"),
    ],
)
def test_describe_shows_how_rows_are_cut_and_stacked(
    server, install, config, batch_dim, stack_inputs
):
    described = server.describe(install(config))
    assert described.get("batchDim") == batch_dim
    assert described.get("stackInputs") == stack_inputs


def test_a_goal_makes_the_policy_adaptive_and_another_policy_ends_it(server, install, change):
    name = install()
    assert change(name, max_latency_ms=5000).status_code == 200
    described = server.describe(name)
    assert (described["batchPolicy"], described["maxLatencyMs"]) == ("adaptive", 5000)
    assert described["batching"]["isAutomatic"] is True  # nobody had given a size
    assert described["batching"]["why"] == "learning"
    assert server.ask(name, id=1).status_code == 200
    assert change(name, batch_policy="fixed").status_code == 200
    described = server.describe(name)
    assert [described[key] for key in ("batchPolicy", "maxLatencyMs", "batchSize")] == [
        "fixed",
        0,
        1,
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_what_requests_no_longer_set_is_decided_by_the_archive_again(
    server, install, change, as_json
):
    name = install("maxBatchDelay: 7\nresponseTimeout: 33\n", batch_size=2, handler=ONE_IS_20_MS)
    before = server.describe(name)
    decided = {"batchSize": "request", "maxBatchDelay": "yaml", "responseTimeout": "yaml"}
    decided |= {"batchPolicy": "server", "jobQueueSize": "server", "startupTimeout": "server"}
    assert before["decidedBy"].items() >= decided.items()
    assert "numRequests" not in before["decidedBy"]
    changes = {"max_batch_delay": 9, "num_requests": 3, "performance_hint": "throughput"}
    assert change(name, **changes).status_code == 200
    during = server.describe(name)
    assert during["decidedBy"]["batchPolicy"] == "performance_hint"
    names = ["max_batch_delay", "num_requests", "performance_hint"]
    query = {"unset": names if as_json else ",".join(names), "batch_size": 2}
    how = {"json": query} if as_json else {"params": query}
    answer = server.management("PUT", f"/models/{name}", **how)
    assert (answer.status_code, "warnings" in answer.json()) == (200, False)
    after = server.describe(name)
    assert settings_of(after) == settings_of(before)
    assert after["decidedBy"] == before["decidedBy"]
    assert change(name, unset="batch_size").status_code == 200
    assert change(name, max_latency_ms=900).status_code == 200
    assert server.describe(name)["batching"]["isAutomatic"] is True


@pytest.mark.parametrize("unset", ["", "batchsize", "torch_threads", "min_worker", "batch_size,"])
def test_only_settings_of_changes_can_be_unset(shared, change, unset):
    server, name = shared
    assert "is not one of performance_hint, " in refused(change(name, unset=unset))
    assert server.describe(name)["batchSize"] == 3


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"batch_size": 0}, "batch_size=0: it is a whole number, 1 or more, or auto."),
        ({"batch_size": -1}, "batch_size=-1: "),
        ({"batch_size": "many"}, "batch_size=many: "),
        ({"batch_size": 2, "max_batch_size": 3}, "batch_size and max_batch_size are names of"),
        ({"max_batch_delay": -1}, "max_batch_delay=-1: it is a whole number, 0 or more."),
        ({"batch_policy": "best"}, "batch_policy=best: it is one of fixed, greedy, adaptive, "),
        ({"max_latency_ms": "soon"}, "max_latency_ms=soon: "),
        ({"max_latency_ms": 50, "batch_policy": "greedy"}, "only batch_policy=adaptive has a"),
        ({"num_requests": -1}, "num_requests=-1: "),
        ({"job_queue_size": 0}, "job_queue_size=0: it is a whole number, 1 or more."),
        (
            {"compiled_batch_sizes": "4,1"},
            "compiled_batch_sizes=4,1: each is at least 1 and larger",
        ),
        ({"compiled_batch_sizes": "a,b"}, "compiled_batch_sizes=['a', 'b']: it is a list of whole"),
        ({"compiled_batch_sizes": "1,2"}, "batch_size=3: the largest of compiled_batch_sizes=1,2"),
        ({"batch_size": 4, "min_worker": -1}, "min_worker cannot be less than 0."),
        ({"batch_size": 4, "min_worker": "many"}, "min_worker cannot be less than 0."),
        ({"batch_size": 4, "min_worker": 2, "max_worker": 1}, "max_worker cannot be less than"),
        ({"batch_size": 4, "min_worker": 1001}, "1001 workers are too many"),
    ],
)
def test_what_is_wrong_is_reported_and_changes_nothing(shared, change, query, words):
    server, name = shared
    before = server.describe(name)
    assert words in refused(change(name, **query))
    after = server.describe(name)
    changing = {"memoryUsage"}
    for each in (before, after):
        each["workers"] = [
            {key: value for key, value in worker.items() if key not in changing}
            for worker in each["workers"]
        ]
    assert after == before


@pytest.fixture(scope="module")
def shared(server, handlers):
    """A model whose settings nobody succeeds in changing."""
    server.install(handlers / "lab.py", "unchanged", batch_size=3, max_batch_delay=5)
    return server, "unchanged"


def test_batching_and_workers_in_one_call(server, install, change):
    name = install()
    answer = change(name, batch_size=6, min_worker=2, synchronous="true")
    assert (answer.status_code, answer.json()["status"]) == (
        200,
        f"Workers scaled to 2 for model: {name}",
    )
    described = server.describe(name)
    assert (described["batchSize"], len(described["workers"])) == (6, 2)
    answer = change(name, batch_size=7, max_worker=3)
    assert answer.status_code == 202
    assert server.describe(name)["batchSize"] == 7
    server.wait_workers(name, "READY", "READY")


@pytest.mark.parametrize("path", ["nobody", "nobody/1.0", "unchanged/9.9"])
def test_who_is_not_there_cannot_be_changed(shared, change, path):
    assert change(path, batch_size=2).status_code == 404


def test_a_version_named_in_the_query_is_meant(shared, change):
    _, name = shared
    answer = change(name, model_version="1.0", batch_size=3)
    assert answer.json()["status"].startswith(f"Batching updated for model: {name}, version: 1.0: ")
    assert change(name, model_version="9.9", batch_size=3).status_code == 404


def test_more_answers_than_the_worker_was_started_for(start_server, background, gate):
    """Its connection had been told how long a reply may be."""
    large = 7_000_000
    source = (
        "def handle(data, context):\n"
        "    for row in data or ():\n"
        "        if row['body']: open(row['body'].decode()).read()\n"
        f"    return data and [bytes({large})] * len(data)\n"
    )
    with start_server(max_response_size="8000000") as server:
        server.install(source, "large", max_batch_delay=0)
        assert server.management("PUT", "/models/large?batch_size=4").status_code == 200
        first = background(server.predict, "large", data=gate.path)
        gate.wait_entered()
        rest = [background(server.predict, "large") for _ in range(4)]
        server.wait_queued("large", 4)
        gate.open()
        answers = [answer.result() for answer in (first, *rest)]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert {len(answer.content) for answer in answers} == {large}
        assert [each["size"] for each in batches(server, "large")] == [1, 4]


def test_continuous_batches_have_the_new_size_too(server, install, change):
    stepping = install("continuousBatching: true\n", batch_size=2)
    assert "continuousBatching" in refused(change(stepping, batch_policy="greedy"))
    assert "continuousBatching" in refused(change(stepping, batch_size="auto"))
    assert "continuousBatching" in refused(change(stepping, max_latency_ms=50))
    assert change(stepping, batch_size=3).status_code == 200
    assert server.describe(stepping)["batchSize"] == 3


# -- registrations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"batch_size": 0}, "batch_size=0: it is a whole number, 1 or more, or auto."),
        ({"max_batch_size": "many"}, "max_batch_size=many: "),
        ({"batch_policy": "best"}, "batch_policy=best: it is one of fixed"),
        ({"max_latency_ms": -1}, "max_latency_ms=-1: "),
        ({"max_latency_ms": 5, "batch_policy": "fixed"}, "max_latency_ms=5: only batch_policy="),
        ({"compiled_batch_sizes": "4,4"}, "compiled_batch_sizes=4,4: "),
        ({"compiled_batch_sizes": "1,4", "batch_size": 8}, "batch_size=8: the largest of"),
        ({"job_queue_size": "x"}, "job_queue_size=x: "),
    ],
)
def test_a_registration_that_contradicts_itself_leaves_nothing(
    server, make_archive, handlers, query, words
):
    archive = make_archive(server.store, handlers / "lab.py", "contradictory")
    unpacked = server.unpacked()
    assert words in refused(server.register(archive, initial_workers=1, **query))
    assert not server.is_known("contradictory")
    assert server.unpacked() == unpacked


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("batchPolicy: best\n", "model-config.yaml: batchPolicy=best: it is one of"),
        ("maxLatencyMs: 9\nbatchPolicy: fixed\n", "model-config.yaml: max_latency_ms=9: only"),
        ("compiledBatchSizes: 4\n", "model-config.yaml: compiledBatchSizes=4: it is a list"),
        ("batchSize: 3\nmaxBatchSize: 4\n", "batchSize and maxBatchSize are names of the same"),
        ("priorityQueueSizes: {urgent: 1}\n", "priorityQueueSizes="),
        ("isolateFailures: 1\n", "isolateFailures=1: it is true or false."),
        ("sampleInput: gone.jpg\n", "sampleInput=gone.jpg: no such file in the archive."),
        ("sampleInput: ../../x\n", "sampleInput=../../x: no such file in the archive."),
        ('sampleInput: "\\0"\n', "no such file in the archive."),
        (f"sampleInput: {'x' * 300}\n", "no such file in the archive."),
        ("asyncCommunication: true\nbatchPolicy: greedy\n", "no meaning beside asyncCommunication"),
        ("continuousBatching: true\ndynamicBatchSize: true\n", "dynamicBatchSize=true has no"),
    ],
)
def test_an_archive_that_contradicts_itself_is_refused(
    server, make_archive, handlers, config, words
):
    archive = make_archive(server.store, handlers / "lab.py", "contradictory", config)
    assert words in refused(server.register(archive, initial_workers=1))
    assert not server.is_known("contradictory")


def test_a_goal_below_the_cost_of_one_item_is_refused_once_that_is_known(server, make_archive):
    archive = make_archive(server.store, ONE_IS_20_MS, "slow")
    unpacked = server.unpacked()
    message = refused(server.register(archive, initial_workers=1, max_latency_ms=10))
    assert re.fullmatch(
        r"max_latency_ms=10: a single request takes [0-9.]+ ms; the goal must not be below that\.",
        message,
    )
    assert not server.is_known("slow")
    assert server.unpacked() == unpacked
    answer = server.register(archive, initial_workers=1, max_latency_ms=10, synchronous="false")
    assert answer.status_code == 202
    server.wait_logged("ts_log.log", "Model slow 1.0: max_latency_ms=10: a single request takes")
    assert "a single request takes" in refused(
        server.management("PUT", "/models/slow", params={"max_latency_ms": 5})
    )
    assert server.describe("slow")["maxLatencyMs"] == 10
    # A change of something else is not to blame for it.
    assert server.management("PUT", "/models/slow", params={"batch_size": 2}).status_code == 200
    server.management("DELETE", "/models/slow")


def test_the_size_is_found_by_measuring_and_explained(server, install):
    name = install(handler=TIMED.format(seconds="0.02 + 0.004 * n"), batch_size="auto")
    described = server.describe(name)
    batching = described["batching"]
    assert batching["isAutomatic"] is True
    assert 4 <= batching["size"] == described["batchSize"] < 128
    assert "times the throughput of size 1" in batching["why"]
    costs = batching["costs"]
    assert 10 <= costs["perBatchMs"] <= 60
    assert 2 <= costs["perRequestMs"] <= 12
    assert [each["size"] for each in costs["points"]][:4] == [1, 2, 3, 4]


def test_a_queue_size_that_is_not_in_force_was_described(server, install):
    name = install()

    def described(**query):
        answer = server.management("PUT", f"/models/{name}", params=query)
        found = server.describe(name)
        size, bound = found.get("jobQueueSize"), found["batching"]["queueBound"]
        assert ("job_queue_size" in answer.json()["status"]) is (size is not None)
        return size, bound

    assert described(num_requests=0) == (100, 100)
    assert described(max_latency_ms=500) == (None, 1000)
    assert described(max_latency_ms=0) == (100, 100)
    assert described(max_latency_ms=500, job_queue_size=7) == (7, 7)


def test_where_batching_does_not_pay_it_says_so(server, install):
    name = install(
        handler=TIMED.format(seconds="0.01 * n * n"),
        max_latency_ms=1000,
        max_batch_delay=0,
    )
    batching = server.describe(name)["batching"]
    assert batching["size"] == 1
    assert batching["why"].startswith("batching does not pay")


def test_a_model_that_raises_in_batches_was_said_to_gain_nothing_and_tried_again(
    server, install, together
):
    source = """
class One:
    def initialize(self, context):
        pass
    def sample_input(self):
        return "a"
    def handle(self, data, context):
        if len(data) > 1:
            raise ValueError("one at a time")
        return ["a"]
"""
    name = install(handler=source, batch_size="auto")

    def assert_single():
        batching = server.describe(name)["batching"]
        assert batching["size"] == 1
        assert batching["why"] == "size 2 failed with status 503: Prediction failed"
        assert "exploring" not in batching

    assert_single()
    for _ in range(20):
        answers = together([lambda: server.predict(name, data="x")] * 8)
        assert {answer.text for answer in answers} == {"a"}
    batches = server.management("GET", f"/models/{name}/batches").json()["batches"]
    assert {(each["size"], each["succeeded"]) for each in batches} == {(1, True)}
    assert_single()


def test_a_sample_lies_in_the_archive(server, install, make_archive, tmp_path):
    source = (
        "def handle(data, context):\n"
        "    if data is not None: assert data[0]['body'] == {'a': 1}, data\n"
        "    return data and [1] * len(data)\n"
    )
    (tmp_path / "sample.json").write_text('{"a": 1}')
    archive = make_archive(
        server.store,
        source,
        "sampled",
        "sampleInput: sample.json\nbatchPolicy: adaptive\n",
        extra_files=str(tmp_path / "sample.json"),
    )
    assert server.register(archive, initial_workers=1).status_code == 200
    assert server.describe("sampled")["batching"]["costs"]["points"][0]["size"] == 1
    server.management("DELETE", "/models/sampled")


def test_configured_for_all_and_for_one(start_server, make_archive, handlers):
    models = {"one": {"1.0": {"batchPolicy": "fixed", "batchSize": 3, "numRequests": 2}}}
    properties = {"default_batch_policy": "greedy", "models": json.dumps(models)}
    with start_server(**properties) as server:
        for name in ("one", "other"):
            make_archive(server.store, handlers / "lab.py", name)
            assert server.register(f"{name}.mar", initial_workers=0).status_code == 200
        first, other = server.describe("one"), server.describe("other")
        assert (first["batchPolicy"], first["batchSize"], first["numRequests"]) == ("fixed", 3, 2)
        assert [other[key] for key in ("batchPolicy", "batchSize")] == ["greedy", 1]


@pytest.mark.parametrize(
    ("properties", "words"),
    [
        ({"default_batch_policy": "best"}, "default_batch_policy=best"),
        (
            {"models": '{"m": {"1.0": {"maxLatencyMs": "soon"}}}'},
            "maxLatencyMs of m 1.0 to be a whole number, 0 or more, it is 'soon'",
        ),
    ],
)
def test_a_wrong_key_stops_the_start(prepare_server, properties, words):
    with prepare_server(**properties) as server:
        assert server.launch().wait(20) == 1
        server.wait_printed(words)


# -- history ---------------------------------------------------------------------------------------


def test_the_last_batches_are_reported(server, install, background, gate):
    name = install(batch_size=3, max_batch_delay=0)
    fill(server, background, gate, name, 4)
    answer = server.management("GET", f"/models/{name}/1.0/batches").json()
    assert (answer["modelName"], answer["modelVersion"]) == (name, "1.0")
    first, second, third = answer["batches"]
    assert [first["size"], second["size"], third["size"]] == [1, 3, 1]
    assert [second["reason"], third["reason"]] == ["full", "window"]
    assert first["closedAt"] <= second["closedAt"] <= third["closedAt"]
    assert second["oldestWaitedMs"] > 0
    assert second["heldMs"] == 0
    assert {each["succeeded"] for each in answer["batches"]} == {True}
    assert "predictedMs" not in first
    samples = server.metrics("marserve_queue_seconds_count", "marserve_batch_window_seconds_count")
    assert [count for series, count in samples.items() if f'"{name}"' in series] == [5, 0]


@pytest.mark.parametrize("path", ["/models/{model_name}", "/models/{model_name}/batches"])
def test_what_is_answered_is_what_is_described(server, install, path):
    name = install(batch_size="auto", max_batch_delay=0)
    assert server.ask(name, id=1).status_code == 200
    document = server.management("OPTIONS", "/").json()
    schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
    answer = server.management("GET", path.format(model_name=name))
    jsonschema.validate(answer.json(), {**schema["schema"], "components": document["components"]})
    options = server.management("OPTIONS", path.format(model_name=name))
    assert path in options.json()["paths"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["unchanged/batches", "unchanged/1.0/batches"])
def test_the_history_is_only_read(shared, method, path):
    server, _ = shared
    assert server.management(method, f"/models/{path}").status_code == 405


@pytest.mark.parametrize("path", ["nobody/batches", "nobody/1/batches", "unchanged/9.9/batches"])
def test_who_is_not_there_has_no_history(shared, path):
    server, _ = shared
    assert server.management("GET", f"/models/{path}").status_code == 404


def test_a_version_of_that_name_wins_over_the_short_form(server, make_archive, handlers):
    archive = make_archive(server.store, handlers / "lab.py", "named", version="batches")
    assert server.register(archive).status_code == 200
    described = server.management("GET", "/models/named/batches").json()
    assert described[0]["modelVersion"] == "batches"
    assert server.management("GET", "/models/named/batches/batches").json()["batches"] == []
    assert server.management("DELETE", "/models/named/batches").status_code == 200


# -- snapshots -------------------------------------------------------------------------------------


@pytest.fixture
def prepared(prepare_server):
    with prepare_server() as server:
        server.habits = []
        yield server


def saved(server):
    file = max((server.directory / "logs" / "config").glob("*.cfg"))
    return json.loads(parse_properties(file.read_text())["model_snapshot"])["models"]


def restart(server, *arguments):
    before = server.console_text().count("Model server started.")
    server.start(*arguments)
    wait_for(lambda: server.console_text().count("Model server started.") > before)


def settings_of(described):
    text = "batchPolicy maxLatencyMs numRequests compiledBatchSizes jobQueueSize batchSize"
    return {key: described.get(key) for key in (*text.split(), "maxBatchDelay")}


def test_what_was_changed_and_learnt_comes_back(prepared, make_archive, handlers):
    make_archive(prepared.store, ONE_IS_20_MS, "timed", "batchPolicy: greedy\n")
    make_archive(prepared.store, handlers / "lab.py", "lab")
    restart(prepared)
    assert prepared.register("timed.mar", initial_workers=1, max_latency_ms=400).status_code == 200
    assert prepared.register("lab.mar", batch_size=5).status_code == 200
    assert "batchPolicy" not in saved(prepared)["lab"]["1.0"]
    changes = {"batch_policy": "fixed_or_single", "max_batch_delay": 7, "job_queue_size": 9}
    changes |= {"compiled_batch_sizes": "1,5"}
    assert prepared.management("PUT", "/models/lab", params=changes).status_code == 200
    before = {name: prepared.describe(name) for name in ("timed", "lab")}
    prepared.stop()
    written = saved(prepared)["timed"]["1.0"]
    assert written["batchSizeAuto"] is True
    assert written["batchSize"] == before["timed"]["batchSize"]
    assert (written["batchPolicy"], written["maxLatencyMs"]) == ("adaptive", 400)
    assert written["batchCosts"][0][0] == 1
    assert 18 <= written["batchCosts"][0][1] <= 80

    restart(prepared)
    prepared.wait_workers("timed", "READY")
    after = {name: prepared.describe(name) for name in ("timed", "lab")}
    assert {name: settings_of(each) for name, each in after.items()} == {
        name: settings_of(each) for name, each in before.items()
    }
    assert after["timed"]["batching"]["why"] == before["timed"]["batching"]["why"]
    assert prepared.log("model_log.log").count("Batch sizes profiled") == 1  # not once more
    prepared.stop()
