"""Register, list, describe, scale, set the default, unregister."""

import json

import pytest

pytestmark = pytest.mark.integration

GOOD = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"
MEMBERS = [
    "modelName",
    "modelVersion",
    "modelUrl",
    "runtime",
    "minWorkers",
    "maxWorkers",
    "batchSize",
    "maxBatchDelay",
    "responseTimeout",
    "startupTimeout",
    "maxRetryTimeoutInSec",
    "clientTimeoutInMills",
    "parallelType",
    "parallelLevel",
    "deviceType",
    "continuousBatching",
    "useJobTicket",
    "useVenv",
    "stateful",
    "sequenceMaxIdleMSec",
    "sequenceTimeoutMSec",
    "maxNumSequence",
    "maxSequenceJobQueueSize",
    "loadedAtStartup",
    "workers",
    "jobQueueStatus",
    "batchPolicy",
    "maxLatencyMs",
    "numRequests",
    "compiledBatchSizes",
    "jobQueueSize",
    "batchBucketBy",
    "dynamicBatchSize",
    "validateBatching",
    "outstandingBatches",
    "torchThreads",
    "torchWaitPolicy",
    "handler",
    "s3SseKms",
    "decidedBy",
    "batching",
]


@pytest.fixture(autouse=True)
def clean(server):
    yield
    models = server.management("GET", "/models").json()["models"]
    for name in [model["modelName"] for model in models]:
        versions = server.management("GET", f"/models/{name}/all").json()
        for version in [each["modelVersion"] for each in versions]:
            server.management("DELETE", f"/models/{name}/{version}")
        server.management("DELETE", f"/models/{name}")
    assert server.management("GET", "/models").json()["models"] == []
    assert server.unpacked() == set()


@pytest.fixture
def pack(server, make_archive):
    def make(name="good", version="1.0", **options):
        return make_archive(server.store, GOOD.format(version), name, version=version, **options)

    return make


def outcome(answer):
    return answer.status_code, answer.json()["status"]


def test_registering_without_workers(server, pack):
    answer = server.register(pack())
    assert answer.text == (
        '{\n  "status": "Model \\"good\\" Version: 1.0 registered with 0 initial workers. '
        'Use scale workers API to add workers for the model."\n}\n'
    )
    assert answer.status_code == 200
    assert server.describe("good")["workers"] == []


def test_registering_synchronously(server, pack):
    answer = server.register(pack(), initial_workers=2, synchronous="true")
    text = 'Model "good" Version: 1.0 registered with 2 initial workers'
    assert outcome(answer) == (200, text)
    assert [worker["status"] for worker in server.describe("good")["workers"]] == ["READY", "READY"]
    assert server.predict("good").text == "1.0"


def test_registering_asynchronously(server, pack):
    answer = server.register(pack(), initial_workers=1, synchronous="false")
    assert outcome(answer) == (202, "Processing worker updates...")
    assert server.predict("good").text == "1.0"  # waits in the queue for the worker


def test_a_load_that_fails_in_the_background_is_seen_in_describe(server, make_archive, wait_for):
    archive = make_archive(server.store, "import no_such_package", "late")
    answer = server.register(archive, initial_workers=1, synchronous="false")
    assert answer.status_code == 202
    wait_for(lambda: "no_such_package" in server.worker("late").get("lastError", ""))
    assert server.worker("late")["status"] == "UNLOADING"


def test_registering_by_a_json_body(server, pack):
    body = {
        "url": pack().name,
        "model_name": "renamed",
        "batch_size": 4,
        "initial_workers": "1",
        "synchronous": True,
        "response_timeout": 7,
        "unknown": {},
    }
    answer = server.management("POST", "/models?model_name=ignored", json=body)
    assert outcome(answer)[0] == 200, answer.text
    renamed = server.describe("renamed")
    assert (renamed["batchSize"], renamed["maxBatchDelay"]) == (4, 100)
    assert renamed["responseTimeout"] == 7
    assert server.predict("renamed").text == "1.0"


@pytest.mark.parametrize("name", ["startup_timeout", "response_timeout"])
def test_a_timeout_of_no_time_was_taken_for_not_given(server, pack, name):
    archive = pack()
    answer = server.register(archive, initial_workers=1, **{name: 0})
    assert answer.status_code == 400
    assert answer.json()["message"] == f"{name}=0: it is a whole number, 1 or more."
    assert not server.is_known("good")
    assert server.register(archive, **{name: -1}).status_code == 200
    assert server.describe("good")["responseTimeout"] == 120


def test_registering_with_another_handler(server, make_archive, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(GOOD.format("other"))
    archive = make_archive(server.store, GOOD.format("first"), "good", extra_files=str(other))
    assert server.register(archive, handler="other.py:handle", initial_workers=1).status_code == 200
    assert server.predict("good").text == "other"


@pytest.mark.parametrize("form", ["tgz", "no-archive", "zip-store"])
def test_every_form_of_archive(server, pack, form):
    archive = pack("formed", archive_format=form)
    assert server.register(archive, initial_workers=1).status_code == 200
    assert server.predict("formed").text == "1.0"


def test_registering_twice(server, pack):
    assert server.register(pack(), initial_workers=1).status_code == 200
    again = server.register(pack(), initial_workers=1)
    assert again.status_code == 409
    assert again.json() == {
        "code": 409,
        "type": "ConflictStatusException",
        "message": "Model version 1.0 is already registered for model good",
    }
    assert server.predict("good").text == "1.0"
    assert len(server.unpacked()) == 1


def test_registering_twice_at_the_same_time(server, pack, together):
    archive = pack()
    answers = together([lambda: server.register(archive, initial_workers=1)] * 4)
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    assert len(server.unpacked()) == 1


def test_the_list_comes_in_pages(server, pack):
    for number in range(5):
        assert server.register(pack(f"m{number}")).status_code == 200

    def page(**query):
        answer = server.management("GET", "/models", params=query).json()
        return answer.get("nextPageToken"), [model["modelName"] for model in answer["models"]]

    assert page(limit=2) == ("2", ["m0", "m1"])
    assert page(limit=2, next_page_token=2) == ("4", ["m2", "m3"])
    assert page(limit=2, next_page_token=4) == (None, ["m4"])
    assert page(limit=3, next_page_token=2) == ("5", ["m2", "m3", "m4"])
    assert page(next_page_token=9) == (None, [])
    assert page() == (None, ["m0", "m1", "m2", "m3", "m4"])
    assert page(limit=0)[1] == []
    first = server.management("GET", "/models?limit=1").json()["models"][0]
    assert first == {"modelName": "m0", "modelUrl": "m0.mar"}


def test_an_empty_list_to_the_byte(server):
    assert server.management("GET", "/models").text == '{\n  "models": []\n}\n'


def test_describe(server, make_archive):
    config = "minWorkers: 1\nmaxWorkers: 2\nbatchSize: 3\nmaxBatchDelay: 70\nresponseTimeout: 33\n"
    config += "jobQueueSize: 5\ndeviceType: cpu\n"
    archive = make_archive(server.store, GOOD.format("x"), "good", config)
    assert server.register(archive).status_code == 200
    (described,) = server.management("GET", "/models/good").json()
    assert list(described) == MEMBERS
    numbers = ("minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout")
    assert [described[name] for name in numbers] == [1, 2, 3, 70, 33]
    assert described["jobQueueStatus"] == {"remainingCapacity": 5, "pendingRequests": 0}
    (worker,) = described["workers"]
    theirs = ["id", "startTime", "status", "memoryUsage", "pid", "gpu", "gpuUsage"]
    assert list(worker) == [*theirs, "state", "torch"]
    assert (worker["status"], worker["gpu"], worker["gpuUsage"]) == ("READY", False, "N/A")
    assert worker["memoryUsage"] > 0


def test_versions(server, pack):
    assert server.register(pack("good", "1.0"), initial_workers=1).status_code == 200
    assert server.register(pack("good", "2.0"), initial_workers=1).status_code == 200
    assert server.predict("good").text == "1.0"
    assert server.predict("good/2.0").text == "2.0"
    everything = server.management("GET", "/models/good/all").json()
    assert [each["modelVersion"] for each in everything] == ["1.0", "2.0"]
    assert server.management("GET", "/models/good/2.0").json()[0]["modelVersion"] == "2.0"

    answer = server.management("PUT", "/models/good/2.0/set-default")
    text = 'Default version successfully updated for model "good" to "2.0"'
    assert outcome(answer) == (200, text)
    assert server.predict("good").text == "2.0"

    refused = server.management("DELETE", "/models/good/2.0")
    assert refused.status_code == 403
    assert refused.json() == {
        "code": 403,
        "type": "InvalidModelVersionException",
        "message": "Cannot remove default version for model good",
    }
    assert server.management("DELETE", "/models/good").status_code == 403
    assert outcome(server.management("DELETE", "/models/good/1.0")) == (
        200,
        'Model "good" unregistered',
    )
    assert server.predict("good/1.0").status_code == 404
    assert server.predict("good").text == "2.0"
    assert server.management("DELETE", "/models/good").status_code == 200
    assert server.predict("good").status_code == 404


def test_scaling_up_and_down(server, pack):
    assert server.register(pack(), initial_workers=1).status_code == 200
    up = server.management("PUT", "/models/good?min_worker=3&synchronous=true")
    assert outcome(up) == (200, "Workers scaled to 3 for model: good")
    assert [worker["status"] for worker in server.describe("good")["workers"]] == ["READY"] * 3
    assert server.describe("good")["maxWorkers"] == 3

    query = "min_worker=1&max_worker=2&synchronous=true"
    down = server.management("PUT", f"/models/good/1.0?{query}")
    assert outcome(down) == (200, "Workers scaled to 1 for model: good, version: 1.0")
    assert len(server.describe("good")["workers"]) == 2  # the maximum cuts, nothing grows

    query = "min_worker=1&model_version=1.0"
    later = server.management("PUT", f"/models/good?{query}")
    assert outcome(later) == (202, "Processing worker updates...")
    server.wait_workers("good", "READY")


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("max_latency=50", "max_latency is not a parameter of this server; did you mean max_laten"),
        ("max_latency=50&synchronous=true", "; did you mean max_latency_ms?"),
        ("min_workers=3", "did you mean min_worker?"),
        ("workers=3&synchronous=true", "; the workers are initial_workers, or later min_worker"),
        ("initial_workers=3", "initial_workers counts when a model is registered, and not later."),
        ("torch_threads=1&timeout=9", "torch_threads counts when a model is registered, and not"),
        ("response_timeout=9", "response_timeout counts when a model is registered, and not later"),
        (
            "responseTimeout=9&synchronous=true",
            "response_timeout counts when a model is registered",
        ),
        ("isolateFailures=false", "isolateFailures counts in model-config.yaml."),
        ("nobody=1&knows=2", "knows is not a parameter of this server. nobody is not a parameter"),
    ],
)
@pytest.mark.parametrize("form", ["query", "json", "version"])
def test_a_change_of_unknown_parameters_keeps_the_workers(server, pack, query, sentence, form):
    assert server.register(pack(), initial_workers=2, batch_size=3).status_code == 200
    path = "/models/good/1.0" if form == "version" else "/models/good"
    values = dict(pair.split("=") for pair in query.split("&"))
    how = {"json": values} if form == "json" else {"params": values}
    answer = server.management("PUT", path, **how)
    assert answer.status_code == 400
    assert sentence in answer.json()["message"]
    described = server.describe("good")
    assert (described["minWorkers"], described["batchSize"]) == (2, 3)


def test_workers_in_the_query_beside_a_body_of_json_are_not_lost(server, pack):
    assert server.register(pack(), initial_workers=2).status_code == 200
    answer = server.management("PUT", "/models/good?min_worker=3", json={})
    assert answer.status_code == 400
    told = "'min_worker' in the query does not count beside a body of JSON."
    assert answer.json()["message"] == told
    assert server.describe("good")["minWorkers"] == 2


def test_a_setting_without_a_value_keeps_the_workers(server, pack):
    assert server.register(pack(), initial_workers=2, batch_size=3).status_code == 200
    answer = server.management("PUT", "/models/good", json={"batch_size": None})
    assert answer.status_code == 200
    described = server.describe("good")
    assert (described["minWorkers"], described["batchSize"]) == (2, 3)


@pytest.mark.parametrize(
    "query",
    [
        "",
        "synchronous=true",
        "timeout=5",
        "number_gpu=1",
        "model_version=1.0",
        "timeout=5&nobody=1",
    ],
)
def test_a_change_without_parameters_scales_to_one_worker_as_in_torchserve(server, pack, query):
    assert server.register(pack(), initial_workers=2).status_code == 200
    assert server.management("PUT", f"/models/good?{query}").status_code in (200, 202)
    assert server.describe("good")["minWorkers"] == 1


def test_scaled_to_nothing_and_back(server, pack):
    assert server.register(pack(), initial_workers=1).status_code == 200
    answer = server.management("PUT", "/models/good?min_worker=0&synchronous=true")
    assert answer.status_code == 200
    assert server.predict("good").status_code == 503
    assert server.inference("GET", "/ping").status_code == 200
    answer = server.management("PUT", "/models/good?min_worker=1&synchronous=true")
    assert answer.status_code == 200
    assert server.predict("good").text == "1.0"


def test_scaling_up_what_cannot_be_loaded(server, make_archive):
    archive = make_archive(server.store, "import no_such_package", "bad")
    assert server.register(archive).status_code == 200
    answer = server.management("PUT", "/models/bad?min_worker=1&synchronous=true")
    assert answer.status_code == 500
    assert "Failed to start workers for model bad version: null" in answer.json()["message"]
    assert "no_such_package" in answer.json()["message"]


def test_scaling_down_lets_requests_finish(server, handlers, background, gate):
    server.install(handlers / "lab.py", "lab")
    request = background(server.ask, "lab", id=1, gate=gate.path)
    gate.wait_entered()
    assert server.management("PUT", "/models/lab?min_worker=0").status_code == 202
    gate.open()
    assert request.result().json() == {"id": 1, "batch": 1}
    server.wait_workers("lab")


def test_unregistering_lets_requests_finish(server, handlers, background, gate, wait_for):
    server.install(handlers / "lab.py", "lab")
    requests = [background(server.ask, "lab", id=1, gate=gate.path)]
    gate.wait_entered()
    requests.append(background(server.ask, "lab", id=2))
    server.wait_queued("lab", 1)
    removal = background(server.management, "DELETE", "/models/lab")
    wait_for(lambda: not server.is_known("lab"))
    assert server.ask("lab", id=3).status_code == 404
    gate.open()
    assert [request.result().json()["id"] for request in requests] == [1, 2]
    assert outcome(removal.result()) == (200, 'Model "lab" unregistered')
    assert server.unpacked() == set()


def test_unregistered_and_registered_again(server, pack):
    for _ in range(3):
        assert server.register(pack(), initial_workers=1).status_code == 200
        assert server.predict("good").text == "1.0"
        assert server.management("DELETE", "/models/good").status_code == 200
    assert (server.store / "good.mar").exists()


def test_a_registration_goes_on_when_its_client_hangs_up(server, make_archive, gate):
    source = f"""
def handle(data, context):
    if data is None:
        open({gate.path!r}).read()
        return None
    return ["loaded"] * len(data)
"""
    archive = make_archive(server.store, source, "slow")
    with server.connect("management") as client:
        client.sendall(
            b"POST /models?url=%b&initial_workers=1 HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            b"Content-Length: 0\r\n\r\n" % archive.name.encode()
        )
        gate.wait_entered()
    gate.open()
    server.wait_workers("slow", "READY")
    assert server.predict("slow").text == "loaded"


def test_names_are_what_the_path_says(server, pack):
    assert server.register(pack("dotted-name_1.5"), initial_workers=1).status_code == 200
    assert server.predict("dotted-name_1.5").text == "1.0"
    assert server.predict("dotted%2Dname_1.5/").text == "1.0"
    assert json.loads(server.management("GET", "/models/dotted-name_1.5/").text)


def test_the_working_directory_and_imports_of_a_handler(server, make_archive, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 'from beside'\n")
    (tmp_path / "data.txt").write_text("from data")
    source = """
import beside
def handle(data, context):
    return data and [[beside.VALUE, open("data.txt").read()]] * len(data)
"""
    files = f"{tmp_path / 'beside.py'},{tmp_path / 'data.txt'}"
    archive = make_archive(server.store, source, "files", extra_files=files)
    assert server.register(archive, initial_workers=1).status_code == 200
    assert server.predict("files").json() == ["from beside", "from data"]


@pytest.mark.parametrize("name", ["..", "n" * 9000])
def test_a_name_that_nobody_could_address_was_registered(server, handlers, make_archive, name):
    archive = make_archive(server.store, handlers / "lab.py", "addressed")
    body = {"url": archive.name, "model_name": name}
    answer = server.management("POST", "/models", json=body)
    assert answer.status_code == 400
    assert answer.json()["type"] == "InvalidModelException"
    listed = server.management("GET", "/models").json()["models"]
    assert name not in [each["modelName"] for each in listed]


def test_a_long_url_or_handler_filled_logs_and_descriptions(server, handlers, make_archive):
    archive = make_archive(server.store, handlers / "lab.py", "long")
    for body in ({"url": "u" * 1_000_000}, {"url": archive.name, "handler": "h" * 1_000_000}):
        before = len(server.log("ts_log.log"))
        assert server.management("POST", "/models", json=body).status_code == 400
        assert len(server.log("ts_log.log")) - before < 1000
