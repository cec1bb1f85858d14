"""A language model from the launcher to the client, with a stand-in for the engine's server alone.

tests/llm runs the real engine.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from servers import ENGINE, make_archive, make_engine_program

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server(prepare_server, tmp_path_factory):
    path = make_engine_program(tmp_path_factory.mktemp("bin"))
    with prepare_server({"PATH": path, "VLLM_API_KEY": "secret"}) as server:
        words = ["--model_name", "llm", "--model_store", str(server.store), "--model_id", "org/llm"]
        words += ["--vllm_engine.max_num_seqs", "8", "--disable_token_auth"]
        with server.console.open("ab") as console:
            server.process = subprocess.Popen(
                [sys.executable, "-m", "ts.llm_launcher", *words],
                cwd=server.directory,
                env=server.environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server.wait_ready()
        server.wait_workers("llm", "READY")
        yield server
        server.stop()
        assert not (server.store / "llm").exists()  # the launcher's directory is gone


def install(server, name, config):
    """Register a model with ``vllm_handler``; return the answer."""
    archive = make_archive(
        server.store, "vllm_handler", name, f"asyncCommunication: true\n{config}"
    )
    return server.register(archive, initial_workers=1)


def complete(server, model="llm", prompt="meow", path="1.0/v1/completions", **more):
    body = {"model": model, "prompt": prompt, **more}
    route = f"/predictions/{model.partition(':')[0]}/{path}"
    return server.inference("POST", route, json=body, stream=more.get("stream", False))


def engine_metrics(server, name):
    return [n for series, n in server.metrics().items() if series.startswith(f"stand_in:{name}{{")]


def test_a_completion_and_the_command_line(server):
    answer = complete(server)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    document = answer.json()
    assert document["text"] == "MEOW"
    assert document["options"]["model"] == "org/llm"
    assert document["options"]["served_model_name"] == ["org/llm", "llm", "llm:1.0"]
    assert document["options"]["max_num_seqs"] == 8
    assert document["api_key"] is None  # tokens are the server's


def test_the_body_and_the_trace_are_relayed_unchanged(server):
    body = b'{ "model": "llm",\n "prompt" : "caf\\u00e9 \xc3\xa9", "unknown": 1.50 }'
    headers = {"Content-Type": "application/json", "Traceparent": "00-ab-cd-01"}
    answer = server.inference(
        "POST", "/predictions/llm/1.0/v1/completions", data=body, headers=headers
    )
    document = answer.json()
    assert document["body"].encode() == body
    assert document["traceparent"] == "00-ab-cd-01"
    assert document["request_id"] == answer.headers["x-request-id"]


def test_a_stream_arrives_event_by_event(server):
    answer = complete(server, prompt="one wait", stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    pieces = answer.iter_content(None)
    received = b""
    while received != b"data: one\n\ndata: wait\n\n":  # before the end, which does not come
        received += next(pieces)
    answer.close()


def test_a_stream_is_relayed_unchanged(server):
    answer = complete(server, prompt="one two three", stream=True)
    events = b"".join(answer.iter_content(None)).split(b"\n\n")
    assert events == [b"data: one", b"data: two", b"data: three", b"data: [DONE]", b""]


def test_a_stream_that_the_engine_breaks_off(server):
    answer = complete(server, prompt="one break", stream=True)
    with pytest.raises(Exception, match=r"IncompleteRead|InvalidChunkLength|ended prematurely"):
        b"".join(answer.iter_content(None))
    assert complete(server).json()["text"] == "MEOW"


def test_an_answer_without_an_end_is_refused_and_other_requests_are_not_disturbed(server, wait_for):
    waiting = complete(server, prompt="one wait", stream=True)
    sent = engine_metrics(server, "sent_bytes")[0]
    before = complete(server).json()["pid"]
    answer = complete(server, prompt="flood")
    assert answer.status_code == 500
    assert answer.json()["message"].startswith("Message size exceed limit: ")
    assert "max_response_size (now 6553500)" in answer.json()["message"]
    wait_for(lambda: engine_metrics(server, "running") == [1])  # the other one
    assert engine_metrics(server, "sent_bytes")[0] - sent < 30_000_000
    assert complete(server).json()["pid"] == before
    assert next(waiting.iter_content(None)).startswith(b"data: one")
    waiting.close()


def test_last_events_without_an_end_are_relayed(server):
    answer = complete(server, prompt="done", stream=True)
    received = b"".join(answer.iter_content(None))
    assert received.count(b"data: [DONE]\n\n") == 10_001
    assert len(received) == len("data: done\n\n") + 10_000 * 1000 + len("data: [DONE]\n\n")


def peak(pid):
    """The most memory that a process has had since the last call, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024


def test_streams_that_are_not_read_do_not_fill_the_memory_and_are_complete(server, wait_for):
    worker = server.worker("llm")["pid"]
    peak(worker)
    before = peak(worker)
    answers = [complete(server, prompt="flood", stream=True) for _ in range(3)]
    counts = []

    def is_still():
        counts.extend(engine_metrics(server, "sent_bytes"))
        return set(counts[-5:]) == {counts[-1]} and len(counts) > 5

    wait_for(is_still)
    assert engine_metrics(server, "running") == [3]
    assert complete(server).json()["text"] == "MEOW"
    for answer in answers:
        number, rest = 0, b""
        for piece in answer.iter_content(1 << 20):
            *events, rest = (rest + piece).split(b"\n\n")
            for event in events:
                assert event.startswith(b"data: %09d" % number)
                number += 1
        assert (number, rest) == (40_000, b"")
    assert peak(worker) - before < 40_000_000
    wait_for(lambda: engine_metrics(server, "running") == [0])


def test_metrics_of_an_engine_without_an_end_are_left_out(server):
    command = f"{sys.executable} {ENGINE} m --uds {{socket}} --flood-metrics"
    assert install(server, "noisy", f"handler: {{command: '{command}'}}\n").status_code == 200
    worker = server.worker("noisy")["pid"]
    peak(worker)
    before = peak(worker)
    assert [each for each in server.metrics() if each.startswith("stand_in:tokens_total")]
    assert peak(worker) - before < 40_000_000
    server.management("DELETE", "/models/noisy")


def test_many_completions_at_once(server, together):
    calls = [lambda n=n: complete(server, prompt=f"p{n}") for n in range(16)]
    assert [answer.json()["text"] for answer in together(calls)] == [f"P{n}" for n in range(16)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_engine_stops_when_the_client_leaves(server, wait_for, background, stream):
    body = json.dumps({"model": "llm", "prompt": "wait", "stream": stream}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with server.connect("inference") as connection:
        path = "POST /predictions/llm/1.0/v1/completions HTTP/1.1\r\nhost: x\r\n"
        connection.sendall(f"{path}{head}".encode() + body)
        wait_for(lambda: engine_metrics(server, "running") == [1])
    wait_for(lambda: engine_metrics(server, "running") == [0])


def test_the_engine_stops_at_the_deadline(server, wait_for):
    answer = server.inference(
        "POST",
        "/predictions/llm/1.0/v1/completions",
        json={"model": "llm", "prompt": "wait"},
        headers={"x-timeout-ms": "300"},
    )
    assert answer.status_code == 504, answer.text
    wait_for(lambda: engine_metrics(server, "running") == [0])


def test_a_stream_of_which_nothing_comes_any_more_is_broken_off_while_others_are_answered(server):
    config = "responseTimeout: 1\nhandler: {model_path: any}\n"
    assert install(server, "stuck", config).status_code == 200
    worker = server.worker("stuck")["id"]
    answer = complete(server, "stuck", prompt="one wait", stream=True)
    others = threading.Event()

    def keep_asking():
        while not others.wait(0.1):
            assert complete(server, "stuck").status_code == 200

    asking = threading.Thread(target=keep_asking)
    asking.start()
    try:
        with pytest.raises(Exception, match=r"IncompleteRead|InvalidChunkLength|ended prematurely"):
            b"".join(answer.iter_content(None))
    finally:
        others.set()
        asking.join()
    assert server.worker("stuck")["id"] == worker
    server.management("DELETE", "/models/stuck")


def test_the_models(server):
    answer = server.inference("GET", "/predictions/llm/1.0/v1/models")
    assert [each["id"] for each in answer.json()["data"]] == ["org/llm", "llm", "llm:1.0"]


def test_what_the_engine_refuses(server):
    body = {"model": "other", "prompt": "meow"}
    answer = server.inference("POST", "/predictions/llm/1.0/v1/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no such model")


def test_a_route_that_is_none(server):
    answer = complete(server, path="1.0/v1/load_lora_adapter")
    assert answer.status_code == 404
    assert answer.json()["message"] == "Unknown API endpoint: v1/load_lora_adapter"


def test_the_metrics_of_the_engine_are_on_the_page(server):
    complete(server, prompt="one two")
    worker = server.worker("llm")["id"]
    label = f'registered_model="llm",model_version="1.0",worker_id="{worker}"'
    found = server.metrics()
    assert found[f'stand_in:tokens_total{{{label},engine="0"}}'] >= 2
    assert found[f"stand_in:running{{{label}}}"] == 0
    assert not [series for series in found if series.startswith("process_cpu")]
    assert list(server.metrics("stand_in:running")) == [f"stand_in:running{{{label}}}"]
    accept = {"headers": {"Accept": "application/openmetrics-text"}}
    page = server._request("metrics", "GET", "/metrics", accept).text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    assert families["stand_in:tokens_total"].type == "unknown"
    (sample,) = families["stand_in:tokens_total"].samples
    assert sample.labels["registered_model"] == "llm"


def test_an_engine_whose_metrics_do_not_come_in_time_keeps_its_worker(server):
    config = "handler: {model_path: any, vllm_engine_config: {silent_metrics: true}}\n"
    assert install(server, "silent", config).status_code == 200
    worker = server.worker("silent")
    for _ in range(2):
        assert not [series for series in server.metrics() if 'registered_model="silent"' in series]
        assert complete(server, "silent").status_code == 200
    assert server.worker("silent") == {
        **worker,
        "memoryUsage": server.worker("silent")["memoryUsage"],
    }
    server.management("DELETE", "/models/silent")


def test_the_output_of_the_engine_is_in_the_log_of_the_model(server):
    server.wait_logged("model_log.log", "The stand-in starts.")


def test_a_worker_ends_with_its_engine_and_is_replaced(server, together):
    before = complete(server).json()["pid"]
    os.kill(before, signal.SIGKILL)
    # The requests meet the dead engine, the dying worker, or the new one.
    answers = together([lambda: complete(server)] * 8)
    assert [answer.status_code for answer in answers] == [200] * 8
    assert before not in {answer.json()["pid"] for answer in answers}
    server.wait_logged("model_log.log", "has ended with status -9.")


def test_a_request_that_ends_its_engine_fails_and_others_do_not(server, wait_for):
    waiting = complete(server, prompt="wait", stream=True)
    wait_for(lambda: engine_metrics(server, "running") == [1])
    assert complete(server, prompt="die").status_code >= 500
    assert complete(server, prompt="again").json()["text"] == "AGAIN"
    with pytest.raises(Exception, match=r"IncompleteRead|InvalidChunkLength|ended prematurely"):
        waiting.content  # noqa: B018 - its stream is broken off


def test_an_engine_ends_with_its_worker(server, wait_for):
    before = complete(server).json()["pid"]
    os.kill(server.worker("llm")["pid"], signal.SIGKILL)
    wait_for(lambda: not psutil.pid_exists(before))
    wait_for(lambda: complete(server).status_code == 200)


def test_an_unknown_key_fails_the_load_by_its_name(server):
    config = "handler: {model_path: m, vllm_engine_config: {warp_speed: 9}}\n"
    answer = install(server, "warped", config)
    assert answer.status_code >= 400
    assert "unrecognized arguments: --warp-speed=9" in answer.text
    assert "vllm_engine_config has ['warp_speed']" in answer.text


def test_an_engine_that_ends_before_it_is_ready(server):
    command = f"{sys.executable} {ENGINE} m --uds {{socket}} --fail-after 0"
    config = f"maxRetryTimeoutInSec: 0\nhandler: {{command: '{command}'}}\n"
    answer = install(server, "failing", config)
    assert answer.status_code >= 400
    assert "has ended with status 3: There is no device." in answer.text


@pytest.mark.parametrize(
    ("place", "name"), [("--port {port}", "by-port"), ("--uds {socket}", "by-socket")]
)
def test_another_engine_by_its_command_line(server, place, name):
    (server.store / "weights").mkdir(exist_ok=True)
    command = f"{sys.executable} {ENGINE} {{model}} {place} --served-model-name {name}"
    config = f"handler: {{model_path: {server.store}/weights, command: '{command}'}}\n"
    assert install(server, name, config).status_code == 200
    document = complete(server, name).json()
    assert document["options"]["model"] == f"{server.store}/weights"
    assert document["text"] == "MEOW"
    server.management("DELETE", f"/models/{name}")


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        ("{}", "lacks handler.model_path"),
        ("{command: sleep 9}", "neither {socket} nor {port}"),
        ("{command: 'x {port}', adapters: {a: b}}", "handler.adapters has no effect beside"),
    ],
)
def test_a_configuration_that_cannot_be_used(server, handler, reason):
    name = f"wrong-{abs(hash(reason))}"
    answer = install(server, name, f"handler: {handler}\n")
    assert answer.status_code >= 400
    assert reason in answer.text
