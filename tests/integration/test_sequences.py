"""Stateful models against real workers: order, batches, ends, deaths, and clients that vanish."""

import json
import os
import signal
import socket

import pytest
import requests

pytestmark = [pytest.mark.integration, pytest.mark.quick]

NAMES = ("id", "start", "end")
LIMITS = {"workers": 1, "delay": 1, "idle": 60_000, "timeout": 0, "most": 8, "queue": 8, "more": ""}
CONFIG = """
minWorkers: {workers}
maxWorkers: {workers}
batchSize: 8
maxBatchDelay: {delay}
sequenceBatching: true
sequenceMaxIdleMSec: {idle}
sequenceTimeoutMSec: {timeout}
maxNumSequence: {most}
maxSequenceJobQueueSize: {queue}
{more}
"""


class Sequences:
    """A stateful model, and what tests do with it."""

    def __init__(self, server, name, record):
        self.server, self.name, self.record = server, name, record

    def ask(self, sequence_id="", say="", *, start=False, end=False, headers=None, **orders):
        named = {"id": sequence_id, "start": start and "true", "end": end and "true"}
        marks = {f"ts_request_sequence_{name}": value for name, value in named.items() if value}
        headers = {**marks, **(headers or {})}
        orders = {"say": say, "record": str(self.record), **orders}
        stream = "pieces" in orders
        return self.server.predict(self.name, json=orders, headers=headers, stream=stream)

    def said(self, *arguments, **options):
        answer = self.ask(*arguments, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()["said"]

    def told(self):
        """What the hook was told, line by line."""
        return self.record.read_text().splitlines()

    @property
    def state(self):
        return self.server.describe(self.name)["sequences"]

    def vanish(self, sequence_id, **orders):
        """A client that sends a request and may be gone before the answer."""
        body = json.dumps({"record": str(self.record), **orders})
        named = f"ts_request_sequence_id: {sequence_id}\r\n" if sequence_id else ""
        head = (
            f"POST /predictions/{self.name} HTTP/1.1\r\nhost: h\r\n{named}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        connection = self.server.connect("inference")
        connection.sendall(f"{head}{body}".encode())
        return connection


@pytest.fixture
def serve(server, handlers, record, request):
    """Install the model with these limits."""

    def install(**limits):
        name = f"stateful-{abs(hash(request.node.name))}"
        config = CONFIG.format(**{**LIMITS, **limits})
        server.install(handlers / "rememberer.py", name, config, initial_workers=None)
        return Sequences(server, name, record)

    return install


def test_each_sequence_is_remembered_and_batches_have_one_request_of_each(
    serve, background, make_gate, server
):
    model, gate = serve(), make_gate()
    holding = background(model.said, "hold", gate=gate.path)
    gate.wait_entered()
    answers = {}
    for say in "xyz":
        for sequence in "abc":
            answers[sequence, say] = background(model.ask, sequence, say)
            server.wait_queued(model.name, len(answers))
    gate.open()
    holding.result()
    for sequence in "abc":
        said = [answers[sequence, say].result().json() for say in "xyz"]
        assert [each["said"] for each in said] == ["x", "xy", "xyz"]
        assert [each["batch"] for each in said] == [3, 3, 3]


def test_a_sequence_stays_with_its_worker(serve):
    model = serve(workers=2)
    pids = {s: {model.ask(s, "x").json()["pid"] for _ in range(5)} for s in "abcd"}
    assert {len(each) for each in pids.values()} == {1}
    assert sorted(model.state["openByWorker"].values()) == [2, 2]


def test_the_answer_has_the_id_and_says_where_a_sequence_begins(serve):
    model = serve()
    first = model.ask("", "x")
    made = first.headers["ts_request_sequence_id"]
    assert made.startswith("ts-seq-")
    assert first.headers["ts_request_sequence_start"] == "true"
    second = model.ask("", "y", headers={"TS_Request_Sequence_ID": made})
    assert second.json()["said"] == "xy"
    assert second.headers["ts_request_sequence_id"] == made
    assert "ts_request_sequence_start" not in second.headers


def test_clients_begin_and_end_and_so_do_handlers(serve, wait_for):
    model = serve()
    assert model.said("a", "x") == "x"
    assert model.said("a", "y", start=True) == "y"
    assert model.said("a", "z", end=True) == "yz"
    assert model.said("a", "1") == "1"
    assert model.said("b", "2") == "2"
    assert model.said("a", "3", over="a;b") == "13"
    wait_for(lambda: len(model.told()) == 4, what=model.told)
    assert model.told()[:2] == ["a end x", "a end yz"]
    assert sorted(model.told()[2:]) == ["a end 13", "b end 2"]
    assert model.state["open"] == 0
    assert model.state["ended"] == {"end": 4}


def test_an_idle_sequence_ends_and_its_slot_is_free(serve, wait_for, server):
    model = serve(idle=200, most=1)
    made = model.ask("", "x").headers["ts_request_sequence_id"]
    wait_for(lambda: model.told() == [f"{made} idle x"], what=model.told)
    answer = model.ask(made, "y")
    assert (answer.status_code, answer.json()["type"]) == (409, "ConflictStatusException")
    again = [model.ask("mine", "x") for _ in range(2)]
    wait_for(lambda: model.state["open"] == 0)
    again.append(model.ask("mine", "x"))
    begun = [answer.headers.get("ts_request_sequence_start") for answer in again]
    assert begun == ["true", None, "true"]
    assert server.metrics()[_series("marserve_sequences_ended_total", model, reason="idle")] == 2


def test_a_sequence_that_is_too_old_ends_though_requests_come(serve, wait_for):
    model = serve(timeout=300)
    while model.said("a", "x") != "x" or not model.told():
        pass
    assert model.told()[0].startswith("a timeout xx")


def test_beyond_the_limits_there_are_503s(serve, background, make_gate, server):
    model, gate = serve(most=2, queue=1), make_gate()
    limits = server.describe(model.name)
    assert (limits["stateful"], limits["maxNumSequence"]) == (True, 8)
    assert (limits["maxSequenceJobQueueSize"], limits["sequenceMaxIdleMSec"]) == (1, 60_000)
    holding = background(model.said, "a", gate=gate.path)
    gate.wait_entered()
    waiting = [background(model.said, "a", "x")]
    server.wait_queued(model.name, 1)
    message = model.ask("a").json()["message"]
    assert message.startswith(f'Model "{model.name}" has no worker to serve inference request. ')
    assert message.endswith(
        ". 1 requests of the sequence wait, as many as maxSequenceJobQueueSize allows."
    )
    waiting += [background(model.said, f"s{number}", "x") for number in range(7)]
    server.wait_queued(model.name, 8)
    refused = model.ask("one too many")
    assert (refused.status_code, refused.json()["type"]) == (503, "ServiceUnavailableException")
    assert refused.json()["message"].endswith(
        ". The model has 8 sequences, as many as maxNumSequence allows."
    )
    gate.open()
    assert [each.result() for each in (holding, *waiting)] == ["", *["x"] * 8]


def test_a_killed_worker_takes_its_sequences_along_and_everybody_is_told(
    serve, background, make_gate, server, wait_for
):
    model, gate = serve(workers=2), make_gate()
    pids = {s: model.ask(s, "x").json()["pid"] for s in ("a", "b", "c", "d")}
    running = background(model.ask, "a", gate=gate.path)
    gate.wait_entered()
    waiting = [background(model.ask, "a", "y"), background(model.ask, "a", "z")]
    server.wait_queued(model.name, 2)
    os.kill(pids["a"], signal.SIGKILL)
    for answer in (running, *waiting):
        told = answer.result()
        assert told.status_code == 409
        assert 'Sequence "a" is over' in told.json()["message"]
        assert "SIGKILL" in told.json()["message"]
    for sequence, pid in pids.items():
        if pid == pids["a"]:
            assert [model.ask(sequence).status_code for _ in range(2)] == [409, 409]
            assert model.said(sequence, "n", start=True) == "n"
            assert model.said(sequence, "n") == "nn"
        else:
            assert model.said(sequence, "n") == "xn"
    assert model.state["ended"] == {"worker_died": 2}
    assert model.state["open"] == 4
    assert server.metrics()[_series("marserve_open_requests", model)] == 0


def test_a_request_that_kills_its_worker_is_not_run_again(serve):
    model = serve()
    assert model.said("a", "x") == "x"
    assert model.ask("a", do="die").status_code == 409
    assert model.ask("a", "y").status_code == 409
    assert model.said("b", "y") == "y"
    assert model.said("a", "z", start=True) == "z"


def test_a_batch_that_fails_is_not_run_again_and_its_sequences_go_on(
    serve, background, make_gate, server
):
    model, gate = serve(), make_gate()
    assert [model.said(s, "x") for s in "ab"] == ["x", "x"]
    holding = background(model.said, "hold", gate=gate.path)
    gate.wait_entered()
    batch = [background(model.ask, "a", "y"), background(model.ask, "b", do="raise")]
    server.wait_queued(model.name, 2)
    gate.open()
    assert [each.result().status_code for each in batch] == [503, 503]
    assert model.said("a", "z") in ("xz", "xyz")  # what the handler had done by then stays done
    assert model.said("b", "z") == "xz"
    assert holding.result() == ""


def test_a_sequence_whose_first_request_was_in_a_failed_batch_still_begins(
    serve, background, make_gate, server
):
    model, gate = serve(), make_gate()
    holding = background(model.said, "hold", gate=gate.path)
    gate.wait_entered()
    batch = [background(model.ask, "a", do="raise"), background(model.ask, "b", "x", start=True)]
    server.wait_queued(model.name, 2)
    gate.open()
    assert [each.result().status_code for each in batch] == [503, 503]
    answer = model.ask("b", "y")
    assert answer.json()["said"] == "y"
    assert answer.headers["ts_request_sequence_start"] == "true"
    assert model.said("b", "z") == "yz"
    assert holding.result() == ""


def test_clients_that_vanish_leave_no_slot_and_no_job_behind(
    serve, make_gate, server, wait_for, background
):
    model, gate = serve(idle=300), make_gate()
    holding = background(model.said, "hold", gate=gate.path)
    gate.wait_entered()
    with model.vanish("a", say="x"), model.vanish("", say="x"):
        server.wait_queued(model.name, 2)
    server.wait_queued(model.name, 0)
    assert model.state["open"] == 1
    gate.open()
    holding.result()
    other = make_gate()
    with model.vanish("", gate=other.path, say="x"):
        other.wait_entered()
    pending = _series("marserve_open_requests", model)
    wait_for(lambda: server.metrics()[pending] == 0)
    other.open()
    wait_for(lambda: model.state["open"] == 0, what=lambda: model.state)
    wait_for(lambda: len(model.told()) == 2, what=model.told)  # the worker hears of it later
    ended = dict(reversed(line.split()[:2]) for line in model.told())
    assert ended["client_gone"].startswith("ts-seq-")
    assert ended["idle"] == "hold"


def test_whose_time_is_over_leaves_the_sequence_as_it_was(serve, background, make_gate, server):
    model, gate = serve(), make_gate()
    running = background(model.ask, "a", "x", gate=gate.path, headers={"X-Timeout-Ms": "300"})
    gate.wait_entered()
    late = model.ask("a", "y", headers={"X-Timeout-Ms": "100"})
    following = background(model.said, "a", "z")
    server.wait_queued(model.name, 1)
    assert (late.status_code, running.result().status_code) == (504, 504)
    server.wait_queued(model.name, 1)  # it still has to wait for its turn
    gate.open()
    assert following.result() == "xz"
    assert server.metrics()[_series("marserve_open_requests", model)] == 0


def test_scaling_down_answers_what_was_accepted_and_tells_the_rest(
    serve, background, make_gate, server, wait_for
):
    model, gate = serve(workers=2), make_gate()
    answers = {s: model.ask(s, "x").json() for s in ("a", "b", "c")}
    pids = [each["pid"] for each in answers.values()]
    alone = next(s for s in answers if pids.count(answers[s]["pid"]) == 1)
    running = background(model.said, alone, "y", gate=gate.path)
    gate.wait_entered()
    waiting = background(model.said, alone, "z")
    server.wait_queued(model.name, 1)
    path = f"/models/{model.name}"
    one = {"min_worker": 1, "max_worker": 1, "synchronous": "true"}
    scaled = background(server.management, "PUT", path, params=one)
    wait_for(lambda: len(server.describe(model.name)["workers"]) == 1)
    refused = model.ask(alone)
    assert (refused.status_code, "being stopped" in refused.text) == (409, True)
    gate.open()
    assert (running.result(), waiting.result()) == ("xy", "xyz")
    assert scaled.result().status_code == 200
    assert model.told() == [f"{alone} worker_stopped xyz"]
    assert model.ask(alone).status_code == 409
    assert model.said(alone, "n", start=True) == "n"
    assert {s: model.said(s, "y") for s in answers if s != alone} == {
        s: "xy" for s in answers if s != alone
    }


def test_when_its_model_goes_a_handler_hears_of_all_sequences(serve, server):
    model = serve()
    assert [model.said(s, s) for s in "ab"] == ["a", "b"]
    assert server.management("DELETE", f"/models/{model.name}").status_code == 200
    assert model.told() == ["a worker_stopped a", "b worker_stopped b"]


def test_a_hook_that_fails_is_logged_and_counted(serve, server, wait_for):
    model = serve()
    model.said("a", "raise", end=True)
    assert model.said("a", "x") == "x"
    failed = _series("marserve_failed_sequence_ends_total", model)
    wait_for(lambda: server.metrics().get(failed) == 1)
    server.wait_logged("model_log.log", "the hook's")


def test_with_continuous_batching_the_next_request_joins_the_answer_before(
    serve, background, make_gate, wait_for, server
):
    model = serve(more="continuousBatching: true", idle=400)
    story = model.ask("a", "x", pieces=1_000_000)
    assert story.headers["ts_request_sequence_id"] == "a"
    assert model.said("a", "y") == "xy"
    assert model.said("a", "z", end=True) == "xyz"
    assert model.told() == []
    following = background(model.said, "a", "n")
    story.close()
    assert following.result() == "n"
    wait_for(lambda: model.told() == ["a end xyz", "a idle n"], what=model.told)
    assert model.state["open"] == 0


def test_a_worker_that_is_killed_over_a_stream(serve, server):
    model = serve(more="continuousBatching: true")
    pid = model.ask("a", "x").json()["pid"]
    story = model.ask("a", "y", pieces=1_000_000)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        assert story.content
    assert model.ask("a", "z").status_code == 409
    assert model.said("a", "n", start=True) == "n"
    assert server.metrics()[_series("marserve_open_requests", model)] == 0


def test_a_description_is_of_no_sequence(serve, server):
    model = serve()
    described = server.management("GET", f"/models/{model.name}", params={"customized": "true"})
    assert described.json()[0]["customizedMetadata"] == {"sequence": "None"}
    assert model.state["open"] == 0


@pytest.mark.parametrize("bad", ["x" * 257, "a\tb"])
def test_what_cannot_be_an_id_is_refused(serve, bad):
    model = serve()
    assert model.ask(bad).status_code == 400
    assert model.state["open"] == 0


ASYNCHRONOUS = """
import asyncio
from pathlib import Path

said, ends = {}, []

async def handle(data, context):
    if data is None:
        return
    sequence = context.get_sequence_id(0)
    if context.get_request_header(0, context.header_key_sequence_start):
        said[sequence] = ""
    await asyncio.sleep(0.01)
    said[sequence] += data[0]["body"]["say"]
    return [{"said": said[sequence], "ends": ends}]

async def end_sequence(sequence_id, reason):
    await asyncio.sleep(0.2)
    ends.append(f"{sequence_id} {reason} {said.pop(sequence_id)}")
"""


def test_coroutines_get_one_request_of_a_sequence_at_a_time(server, record, background, wait_for):
    config = CONFIG.format(**{**LIMITS, "more": "asyncCommunication: true"})
    server.install(ASYNCHRONOUS, "coroutine", config, initial_workers=None)
    model = Sequences(server, "coroutine", record)
    answers = [background(model.said, "abc"[number % 3], "x") for number in range(12)]
    assert sorted(each.result() for each in answers) == sorted(["x", "xx", "xxx", "xxxx"] * 3)
    assert model.said("a", "y", end=True) == "xxxxy"
    answer = model.ask("a", "z").json()  # waits for the hook
    assert answer == {"said": "z", "ends": ["a end xxxxy"]}


def test_the_names_of_the_headers_are_configurable(start_server, handlers, record, make_archive):
    names = {f"ts_header_key_sequence_{name}": f"X-Talk-{name}" for name in NAMES}
    with start_server(**names) as server:
        config = CONFIG.format(**LIMITS)
        server.install(handlers / "rememberer.py", "m", config, initial_workers=None)

        def ask(say, **headers):
            return server.predict(
                "m", json={"say": say}, headers={f"X-Talk-{n}": v for n, v in headers.items()}
            )

        assert ask("x", id="a").json()["said"] == "x"
        answer = ask("y", id="a", end="true")
        assert (answer.json()["said"], answer.headers["X-Talk-id"]) == ("xy", "a")
        assert ask("z", id="a").headers["X-Talk-start"] == "true"
        assert ask("n", id="a", start="true").json()["said"] == "n"

        names_seen = """
def handle(data, context):
    return data and [[context.get_sequence_id(0), context.header_key_sequence_end]]
"""
        server.install(names_seen, "plain")
        answer = server.predict("plain", headers={"X-Talk-id": "b"})
        assert answer.json() == ["b", "X-Talk-end"]


def _series(metric, model, **labels):
    """The name of a sample of a model."""
    values = {"model_name": model.name, "model_version": "1.0", "hostname": socket.gethostname()}
    pairs = "".join(f'{name}="{value}",' for name, value in {**values, **labels}.items())
    return f"{metric}{{{pairs}}}"
