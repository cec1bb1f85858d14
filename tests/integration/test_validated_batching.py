"""validateBatching: a handler whose batches change answers is found before it is served."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import pytest
from servers import wait_for

from marserve.frontend.workers.batch_validation import PENDING
from marserve.tools.bench.main import main as bench

pytestmark = pytest.mark.integration

SAMPLES = {"a.json": {"x": 1.5}, "b.json": {"x": -2.25}, "c.json": {"x": 7}}
NAMED = "sampleInput: [a.json, b.json, c.json]\n"
HANDLER = """
class Handler:
    total = 0.0
    def initialize(self, context):
        self.context = context
    def handle(self, data, context):
        rows = [row["body"]["x"] for row in data]
        {body}
"""
FAITHFUL = "return [{'y': x * 2.0, 'k': int(x), 't': str(x)} for x in rows]"


def source(body=FAITHFUL):
    return HANDLER.replace("{body}", body)


@pytest.fixture
def register(server, make_archive, tmp_path, request):
    names = []

    def say(handler, config=NAMED, samples=SAMPLES, **query):
        name = f"v{abs(hash(request.node.name))}"
        names.append(name)
        files = []
        for file, value in samples.items():
            (tmp_path / file).write_text(json.dumps(value))
            files.append(str(tmp_path / file))
        archive = make_archive(
            server.store, handler, name, config, extra_files=",".join(files) or None
        )
        how = {"batch_size": 5, "initial_workers": 1, "validate_batching": "true", **query}
        return server.register(archive, **how), name

    yield say
    for name in set(names):
        server.management("DELETE", f"/models/{name}")


def refused(server, answer, name):
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "InvalidModelException"
    assert not server.is_known(name)
    message = answer.json()["message"]
    assert "validateBatching: " in message
    return message.partition("validateBatching: ")[2]


def test_a_handler_whose_batches_change_nothing_is_served(server, register):
    answer, name = register(source())
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"status"}
    described = server.describe(name)
    assert described["validateBatching"] is True
    assert described["batching"]["validation"] == {
        "sizes": [2, 3, 5],
        "samples": 3,
        "maxDifference": 0.0,
        "tolerance": 0.0001,
    }
    assert server.predict(name, json={"x": 3}).json()["y"] == 6.0


CULPRITS = {
    "swaps two rows": (
        "return [2.0 * x for x in (rows[::-1] if len(rows) == 2 else rows)]",
        "batching changes answers: in batches of 2 at places 0, 1 (at 0: the answer to sample",
    ),
    "mixes rows of large batches": (
        "return [2.0 * x for x in ([*rows[:3], rows[4], rows[3]] if len(rows) == 5 else rows)]",
        "in batches of 5 at places 3, 4 (at 3: the answer to sample ",
    ),
    "keeps something for the next row": (
        "seen, found = 0.0, []\n"
        "        for x in rows:\n"
        "            seen += x\n"
        "            found.append(seen)\n"
        "        return found",
        "in batches of 2 at place 1 (at 1: ",
    ),
    "keeps something for the next batch": (
        "self.total += len(rows) / 10\n        return [x + self.total for x in rows]",
        "the answer to sample 1 alone is not always the same",
    ),
    "has a status for the wrong row": (
        "if len(rows) > 2: self.context.set_response_status(400, 'Bad Request', 1)\n"
        "        return [2.0 * x for x in rows]",
        "in batches of 3 at place 1 (at 1: the status: 200 and 400)",
    ),
    "fails in batches": (
        "return [2.0 * rows[0]] * len(rows) if len(rows) == 1 else 1 / 0",
        "a batch of 2 failed with status 503: Prediction failed",
    ),
    "answers all alike": ("return ['fine'] * len(rows)", "the samples have the same answers"),
    "leaves it to chance": (
        "import random\n        return [random.random() for x in rows]",
        "alone is not always the same",
    ),
}


@pytest.mark.parametrize("culprit", CULPRITS)
def test_a_handler_that(server, register, culprit):
    body, told = CULPRITS[culprit]
    assert told in refused(server, *register(source(body)))


BATCH_NORM = """
import torch
norm = torch.nn.BatchNorm2d(1).{mode}()
def handle(data, context):
    if data is not None:
        images = [[[[row["body"]["x"], 1.0]]] for row in data]
        return norm(torch.tensor(images, dtype=torch.float32))[:, 0, 0, 0].tolist()
"""


def test_a_model_that_was_left_in_training(server, register):
    """BatchNorm takes mean and variance of the batch then."""
    told = refused(server, *register(BATCH_NORM.format(mode="train")))
    assert told.startswith("batching changes answers: in batches of 2 at places 0, 1 ")
    assert "the largest difference between two numbers is " in told
    assert told.endswith("tolerated are 0.0001.")
    answer, _ = register(BATCH_NORM.format(mode="eval"))
    assert answer.status_code == 200, answer.text


def test_a_tolerance(server, register):
    body = "return [2.0 * x + 0.01 * len(rows) for x in rows]"
    told = refused(server, *register(source(body)))
    assert "the largest difference between two numbers is 0.01" in told
    answer, name = register(source(body), validate_batching_tolerance=0.05)
    assert answer.status_code == 200, answer.text
    found = server.describe(name)["batching"]["validation"]
    assert found["tolerance"] == 0.05
    assert 0.005 < found["maxDifference"] < 0.05


def test_a_precision_has_a_tolerance_of_its_own(server, register):
    body = "return [2.0 * x + 0.01 * (len(rows) - 1) for x in rows]"
    config = f"{NAMED}optimization: {{precision: bf16}}\n"
    answer, name = register(source(body), config)
    assert answer.status_code == 200, answer.text
    assert server.describe(name)["batching"]["validation"]["tolerance"] == 0.05


def test_a_warning_instead_of_a_refusal(server, register):
    body, told = CULPRITS["swaps two rows"]
    answer, name = register(
        source(body), f"{NAMED}validateBatching: warn\n", validate_batching="warn"
    )
    assert answer.status_code == 200, answer.text
    (warning,) = answer.json()["warnings"]
    assert warning.startswith(f"validateBatching: {told}")
    described = server.describe(name)
    assert described["validateBatching"] == "warn"
    assert described["batching"]["validation"]["failure"].startswith(told)
    assert described["batching"]["validation"]["sizes"] == [3, 5]
    assert server.worker(name)["status"] == "READY"


MIXING = "return [sum(rows) / len(rows) for _ in rows]"


def not_batched(server, name, answer):
    """Check that an answer warns of mixed rows; return the description of batching, and this."""
    (warning,) = answer.json()["warnings"]
    assert warning.startswith("validateBatching: batching changes answers: in batches of 2 at ")
    assert warning.endswith("; so batch_size stays 1 unless a number is set.")
    batching = server.describe(name)["batching"]
    assert (batching["size"], batching["isAutomatic"]) == (1, True)
    assert batching["why"].startswith("batching changes answers: ")
    return batching, warning


@pytest.mark.parametrize(
    ("config", "query"),
    [
        (NAMED, {"performance_hint": "throughput"}),
        (NAMED, {"batch_size": "auto"}),
        (NAMED, {"max_latency_ms": 100}),
        (f"{NAMED}performanceHint: throughput\n", {}),
    ],
)
def test_a_model_that_mixes_its_rows_is_not_batched_by_a_hint(server, register, config, query):
    how = {"batch_size": None, "validate_batching": None, **query}
    answer, name = register(
        source(f"import time; time.sleep(0.002)\n        {MIXING}"), config, **how
    )
    assert answer.status_code == 200, answer.text
    batching, _ = not_batched(server, name, answer)
    assert batching["optimalNumberOfRequests"] in (1, 2)
    server.wait_logged("model_log.log", "batching changes answers")
    server.management("PUT", f"/models/{name}", params={"batch_size": 4})
    assert server.describe(name)["batching"]["size"] > 1
    server.management("PUT", f"/models/{name}", params={"batch_size": "auto"})
    assert server.describe(name)["batching"]["size"] == 1


STAGED = f"""
from ts.torch_handler.base_handler import BaseHandler
class Handler(BaseHandler):
    def initialize(self, context): pass
    def preprocess(self, data): return [row["body"]["x"] for row in data]
    def inference(self, rows): {MIXING}
    def postprocess(self, rows): return rows
"""


@pytest.mark.parametrize(
    "query", [{"performance_hint": "throughput"}, {"batch_size": "auto"}, {"max_latency_ms": 2000}]
)
@pytest.mark.parametrize(
    ("handler", "config"),
    [
        (source(MIXING), ""),
        (source(MIXING), "outstandingBatches: 3\n"),
        (source(MIXING), "validateBatching: true\n"),
        (STAGED, "overlapStages: true\n"),
    ],
    ids=["one batch", "several batches", "asked for", "stages"],
)
def test_a_served_model_that_mixes_its_rows_is_not_batched_by_a_hint(
    server, register, handler, config, query
):
    how = {"batch_size": None, "validate_batching": None}
    answer, name = register(handler, NAMED + config, **how)
    assert answer.status_code == 200, answer.text
    with clients_of(server, name) as found:
        answer = server.management("PUT", f"/models/{name}", params=query)
    assert set(found) == {"right"}
    assert answer.status_code == 200, answer.text
    batching, warning = not_batched(server, name, answer)
    assert batching["validation"]["failure"] == warning.removeprefix("validateBatching: ")[:-1]
    server.wait_logged("ts_log.log", "batching changes answers")


@contextmanager
def clients_of(server, name, count=8):
    """Send requests during the block; the result lists whether answers were right."""
    found, end = [], threading.Event()

    def send(x):
        while not end.is_set():
            answer = server.predict(name, json={"x": x})
            is_right = answer.status_code == 200 and answer.json() == x
            found.append("right" if is_right else answer.text)

    with ThreadPoolExecutor(count) as clients:
        sent = [clients.submit(send, float(x)) for x in range(count)]
        wait_for(lambda: len(found) > 2 * count)
        yield found
        seen = len(found)
        wait_for(lambda: len(found) > seen + 2 * count)
        end.set()
    for each in sent:
        each.result()


SERVED = "import time; time.sleep(0.002 + 0.0001 * len(rows))\n        "


@pytest.mark.parametrize("is_busy", [True, False], ids=["busy", "idle"])
def test_a_served_model_is_batched_by_a_hint_when_batches_were_compared(server, register, is_busy):
    how = {"batch_size": None, "validate_batching": None}
    answer, name = register(source(f"{SERVED}return rows"), **how)
    with clients_of(server, name) if is_busy else nullcontext(["right"]) as found:
        answer = server.management("PUT", f"/models/{name}?batch_size=auto")
        assert answer.json().keys() == {"status"}
        wait_for(lambda: server.describe(name)["batching"]["size"] > 1)
    assert set(found) == {"right"}
    validation = server.describe(name)["batching"]["validation"]
    assert validation["sizes"][:2] == [2, 3]
    assert "failure" not in validation


def test_batches_of_a_served_model_are_only_compared_if_they_are_short(server, register, record):
    body = (
        f"import time; time.sleep(0.01 * len(rows))\n"
        f"        open({str(record)!r}, 'a').write(f'{{len(rows)}} ')\n        {MIXING}"
    )
    _, name = register(source(body), batch_size=None, validate_batching=None)
    answer = server.management("PUT", f"/models/{name}?max_latency_ms=400")
    assert "batching changes answers" in answer.json()["warnings"][0]
    largest = max(map(int, record.read_text().split()))
    assert 3 < largest <= 10  # 0.1 s


def test_bench_repeats_the_warning(server, register, capsys):
    _, name = register(source(MIXING), batch_size=None, validate_batching=None)
    ports = {"url": "inference", "management-url": "management", "metrics-url": "metrics"}
    urls = [f"--{each}=http://127.0.0.1:{server.ports[port]}" for each, port in ports.items()]
    sample = ["--input", server.store / f"{name}.json"]
    sample[1].write_text('{"x": 1}')
    load = ["--requests", "8", "--warm-up", "0", "--no-progress", "--clients", "2"]
    assert bench([name, *load, *map(str, sample), "--batch-size", "auto", *urls]) == 0
    assert "validateBatching: batching changes answers: " in capsys.readouterr().err
    assert server.describe(name)["batching"]["isAutomatic"] is False


def test_a_comparison_of_a_served_model_is_not_repeated(server, register, record):
    body = f"open({str(record)!r}, 'a').write(f'{{len(rows)}} ')\n        {MIXING}"
    answer, name = register(source(body), batch_size=None, validate_batching=None)
    for size in ("auto", "1", "auto"):
        answer = server.management("PUT", f"/models/{name}?batch_size={size}")
        assert ("warnings" in answer.json()) == (size == "auto"), answer.text
    assert record.read_text().split().count("3") == 3


def test_a_worker_that_ends_in_a_comparison_is_replaced(server, register):
    body = f"if len(rows) > 1: import os; os._exit(3)\n        {SERVED}return rows"
    _, name = register(source(body), batch_size=None, validate_batching=None)
    server.management("PUT", f"/models/{name}?batch_size=auto")
    wait_for(lambda: server.describe(name)["batching"]["why"] != PENDING)
    server.wait_workers(name, "READY")
    assert server.predict(name, json={"x": 3.0}).json() == 3.0


def test_without_a_worker_batches_are_compared_when_one_is_loaded(server, register):
    how = {"batch_size": None, "validate_batching": None, "initial_workers": 0}
    answer, name = register(source(MIXING), **how)
    answer = server.management("PUT", f"/models/{name}?batch_size=auto")
    assert "warnings" not in answer.json()
    assert server.describe(name)["batching"]["why"] == PENDING
    server.management("PUT", f"/models/{name}?min_worker=2&synchronous=true")
    batching = server.describe(name)["batching"]
    assert batching["why"].startswith("batching changes answers: ")


@pytest.mark.parametrize(
    ("body", "samples", "query"),
    [
        (MIXING, {"a.json": {"x": 1.5}}, {}),
        (CULPRITS["leaves it to chance"][0], SAMPLES, {}),
        (CULPRITS["answers all alike"][0], SAMPLES, {}),
        (MIXING, SAMPLES, {"validate_batching": "false"}),
        ("return [2.0 * x + 0.0001 * len(rows) for x in rows]", SAMPLES, {}),
    ],
    ids=["one sample", "random", "alike", "off", "rounding"],
)
def test_what_shows_no_difference_changes_nothing(server, register, body, samples, query):
    config = f"sampleInput: [{', '.join(samples)}]\n"
    body = f"import time; time.sleep(0.002)\n        {body}"
    how = {"batch_size": "auto", "validate_batching": None, **query}
    answer, name = register(source(body), config, samples, **how)
    assert answer.status_code == 200, answer.text
    assert "warnings" not in answer.json()
    assert server.describe(name)["batching"]["size"] > 1


def test_a_comparison_that_nobody_asked_for_ends_after_two_seconds(server, register, record):
    body = (
        f"import time; time.sleep(0.3)\n"
        f"        open({str(record)!r}, 'a').write(f'{{len(rows)}} {{time.monotonic()}}\\n')\n"
        f"        {FAITHFUL}"
    )
    answer, _ = register(source(body), batch_size="auto", validate_batching=None)
    assert answer.status_code == 200, answer.text
    runs = [line.split() for line in record.read_text().splitlines()]
    singles = [float(at) for size, at in runs if size == "1"]
    assert float(runs[-1][1]) - singles[0] < 8  # 2 for the costs, 2 for the comparison; all: 30


def test_in_model_config_yaml(server, register):
    body, told = CULPRITS["swaps two rows"]
    config = f"{NAMED}validateBatching: true\nvalidateBatchingTolerance: 0.001\n"
    message = refused(server, *register(source(body), config, validate_batching=None))
    assert message.startswith(told)
    assert message.endswith("tolerated are 0.001.")


def test_a_model_that_nobody_waits_for_is_given_up(server, register):
    body, told = CULPRITS["swaps two rows"]
    answer, name = register(source(body), synchronous="false")
    assert answer.status_code == 202
    wait_for(lambda: server.worker(name)["state"] == "FAILED")
    assert told in server.worker(name)["lastError"]
    assert server.predict(name, json={"x": 1}).status_code == 503


@pytest.mark.parametrize(
    ("config", "samples", "query", "told"),
    [
        ("", {}, {}, "there is no sample input: name a file of the archive as sampleInput"),
        ("sampleInput: a.json\n", {"a.json": 1}, {}, "at least two different samples: name files"),
        ("sampleInput: [a.json, b.json]\n", {"a.json": 1, "b.json": 1}, {}, "two different"),
    ],
)
def test_without_different_samples_nothing_can_be_told(
    server, register, config, samples, query, told
):
    assert told in refused(server, *register(source(), config, samples, **query))


@pytest.mark.parametrize(
    ("config", "query", "told"),
    [
        ("asyncCommunication: true\n", {}, "no meaning beside asyncCommunication"),
        ("continuousBatching: true\n", {}, "no meaning beside continuousBatching"),
        (
            "validateBatching: maybe\n",
            {"validate_batching": None},
            "it is true, false, warn or auto",
        ),
        (
            "",
            {"validate_batching": "maybe"},
            "validate_batching=maybe: it is true, false, warn or auto",
        ),
        ("", {"validate_batching_tolerance": "0"}, "it is a number above 0"),
        ("", {"validate_batching_tolerance": "x"}, "it is a number above 0"),
        ("sampleInput: []\n", {}, "it is a file's name, or a list of some"),
        (
            "sampleInput: [a.json, gone.json]\n",
            {},
            "a.json, gone.json: no such file in the archive",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(server, register, config, query, told):
    answer, name = register(source(), config, **query)
    assert answer.status_code == 400, answer.text
    assert told in answer.json()["message"]
    assert not server.is_known(name)


def test_without_batches_there_is_nothing_to_compare(register):
    answer, _ = register(source(), batch_size=1)
    assert answer.json()["warnings"] == [
        "validateBatching compares nothing: there are no batches with batch_size=1."
    ]


def test_compiled_sizes_are_compared_as_they_run(server, register):
    counts = "\n        assert len(rows) in (1, 4, 8), len(rows)\n        "
    answer, name = register(
        source(f"pass{counts}{FAITHFUL}"), batch_size=8, compiled_batch_sizes="1,4,8"
    )
    assert answer.status_code == 200, answer.text
    assert server.describe(name)["batching"]["validation"]["sizes"] == [3, 4, 7, 8]


def test_samples_of_the_handler_and_a_size_found_by_measuring(server, register):
    body = f"time.sleep(0.002 + 0.001 * len(rows))\n        {FAITHFUL}"
    samples = "    def sample_input(self):\n        return ({'x': 1}, {'x': 2})\n"
    handler = f"import time{source(body)}{samples}"
    answer, name = register(handler, "", {}, batch_size="auto")
    assert answer.status_code == 200, answer.text
    batching = server.describe(name)["batching"]
    assert batching["isAutomatic"]
    assert batching["size"] <= batching["validation"]["sizes"][-1]


def test_a_worker_that_comes_later_is_not_compared_again(server, register, record):
    body = f"open({str(record)!r}, 'a').write(str(len(rows)) + ' ')\n        {FAITHFUL}"
    answer, name = register(source(body))
    assert answer.status_code == 200, answer.text
    runs = record.read_text()
    assert {*runs.split()} == {"1", "2", "3", "5"}
    server.management("PUT", f"/models/{name}?min_worker=2&synchronous=true")
    assert record.read_text() == runs
    answer = server.management("PUT", f"/models/{name}?validate_batching=true&num_requests=1")
    assert answer.json()["warnings"] == [
        "validate_batching counts when a model is registered, and not later."
    ]


def test_a_snapshot_has_it_compared_again(prepare_server, make_archive):
    samples = "    def sample_input(self):\n        return ({'x': 1}, {'x': 2})\n"
    with prepare_server() as server:
        server.habits = []
        server.start()
        archive = make_archive(server.store, source() + samples, "kept")
        query = {"validate_batching": "warn", "validate_batching_tolerance": "0.5"}
        assert server.register(archive, initial_workers=1, batch_size=2, **query).status_code == 200
        server.stop()
        server.start()
        server.wait_workers("kept", "READY")
        described = server.describe("kept")
        assert described["validateBatching"] == "warn"
        validation = described["batching"]["validation"]
        assert (validation["sizes"], validation["tolerance"]) == ([2], 0.5)
        server.stop()


def test_after_a_restart_no_size_is_compared_that_was_not_measured(
    prepare_server, make_archive, record
):
    """A batch of 128 of this handler takes 5 seconds."""
    samples = "    def sample_input(self):\n        return ({'x': 1}, {'x': 2})\n"
    body = (
        f"open({str(record)!r}, 'a').write(f'{{len(rows)}} ')\n"
        f"        time.sleep(0.04 * len(rows))\n        {FAITHFUL}"
    )
    with prepare_server() as server:
        server.habits = []
        server.start()
        archive = make_archive(server.store, f"import time{source(body)}{samples}", "kept")
        answer = server.register(archive, initial_workers=1, batch_size="auto")
        assert answer.status_code == 200, answer.text
        measured = max(map(int, record.read_text().split()))
        record.unlink()
        server.stop()
        server.start()
        server.wait_workers("kept", "READY")
        assert 1 < max(map(int, record.read_text().split())) <= measured
        server.stop()


def test_costs_and_comparison_leave_time_for_the_start(server, register, record):
    body = (
        f"open({str(record)!r}, 'a').write(f'{{len(rows)}} ')\n"
        f"        time.sleep(0.06 * len(rows))\n        {FAITHFUL}"
    )
    query = {"batch_size": "auto", "validate_batching": None, "startup_timeout": 3}
    answer, name = register(f"import time{source(body)}", **query)
    assert answer.status_code == 200, answer.text
    assert "lastError" not in server.worker(name)
    assert "2" in record.read_text().split()


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 11)"])
def test_a_handler_that_ends_its_process(server, register, end):
    body = f"import os\n        if len(rows) > 1: {end}\n        {FAITHFUL}"
    answer, name = register(source(body))
    assert answer.status_code == 500
    assert not server.is_known(name)
    answer, name = register(source(body), validate_batching="warn")
    assert answer.status_code == 200, answer.text
    failure = "nothing was compared, since a worker was lost while it tried out batches"
    assert answer.json()["warnings"] == [f"validateBatching: {failure}."]
    assert server.describe(name)["batching"]["validation"]["failure"] == failure
