"""Time lines of requests: planted causes are found by `GET /requests`, and nothing is kept back."""

import contextlib
import json
import os
import re
import signal
import time

import jsonschema
import pytest

pytestmark = pytest.mark.integration

#: Takes 20 ms, and a second for each megabyte.
BY_SIZE = """
import time


def handle(data, context):
    if data is None:
        return None
    time.sleep(0.02 + sum(len(row["body"]) for row in data) / 1e6)
    return ["done"] * len(data)
"""
WORKFLOW = "models: {}\ndag:\n  first: [second]\n"


def lines(server, **query):
    answer = server.management("GET", "/requests", params=query)
    assert answer.status_code == 200, answer.text
    document = server.management("OPTIONS", "/").json()
    schema = document["paths"]["/requests"]["get"]["responses"]["200"]["content"]
    whole = {**schema["application/json"]["schema"], "components": document["components"]}
    jsonschema.validate(answer.json(), whole)
    return answer.json()["requests"]


def line_of(server, answer):
    (line,) = lines(server, id=answer.headers["x-request-id"])
    return line


def events(line):
    return [event["name"] for event in line["events"]]


def send(server, name, body=b"small", **headers):
    headers |= {"content-type": "application/octet-stream"}
    return server.inference("POST", f"/predictions/{name}", data=body, headers=headers)


@pytest.fixture
def by_size(server, request):
    name = f"by-size-{request.node.name.partition('[')[0]}"
    server.install(BY_SIZE, name, min_worker=2, max_worker=2, initial_workers=2)
    yield name
    server.management("DELETE", f"/models/{name}")


def test_a_time_line_has_the_moments_of_a_request_and_its_batch(server, install):
    name = install(batch_size=2, max_batch_delay=30)
    answer = server.ask(name, id=1)
    line = line_of(server, answer)
    assert events(line) == [
        "received",
        "queued",
        "batch closed",
        "handler started",
        "handler ended",
        "answered",
    ]
    moments = [event["atMs"] for event in line["events"]]
    assert moments == sorted(moments)
    assert moments[-1] == line["tookMs"] == pytest.approx(sum(line["shares"].values()), abs=0.01)
    assert line["shares"]["batchingMs"] >= 25
    assert (line["modelName"], line["modelVersion"]) == (name, "1.0")
    assert (line["status"], line["outcome"], line["attempts"]) == (200, "answered", 1)
    assert abs(line["arrivedAt"] / 1000 - time.time()) < 60
    assert line["batch"]["size"] == 1
    assert line["batch"]["reason"] == "window"
    assert line["batch"]["requestBytes"] == [line["requestBytes"]]
    assert str(line["batch"]["workerId"]) == server.describe(name)["workers"][0]["id"]
    assert line["explanation"].endswith("for a larger batch (closed by: window).")


def test_the_slowest_come_first_and_can_be_filtered(server, by_size, install):
    other = install()
    for size in (100, 200_000, 10):
        assert send(server, by_size, bytes(size)).status_code == 200
    assert server.ask(other, id=1).status_code == 200
    found = lines(server, slowest=2, model=by_size)
    assert (len(found), found[0]["requestBytes"]) == (2, 200_000)
    assert {line["modelName"] for line in lines(server, model=other, version="1.0")} == {other}
    assert lines(server, model=other, version="2.0") == []
    assert lines(server, model=by_size, failed=5) == []


@pytest.mark.parametrize("query", ["slowest=0", "slowest=1&failed=1", "since=0", "failed=1.5"])
def test_wrong_parameters_are_refused(server, query):
    answer = server.management("GET", f"/requests?{query}")
    assert answer.status_code == 400
    assert re.search("slowest|since|failed", answer.json()["message"])


def test_an_unknown_request_is_not_found(server):
    assert server.management("GET", "/requests?id=nobody").status_code == 404
    assert server.management("POST", "/requests").status_code == 405
    assert server.management("GET", "/requests/1").status_code == 404


def test_a_large_request_is_found_as_the_cause(server, by_size):
    for _ in range(6):
        send(server, by_size)
    slow = send(server, by_size, bytes(500_000))
    assert line_of(server, slow)["explanation"].endswith(
        "; its input has 500.0 kB, usually 5 bytes."
    )
    assert lines(server, model=by_size)[0]["id"] == slow.headers["x-request-id"]


def test_a_stopped_worker_is_found_as_the_cause(server, by_size, background, wait_for):
    for _ in range(8):
        send(server, by_size)
    pids = [worker["pid"] for worker in server.describe(by_size)["workers"]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        waiting = background(send, server, by_size)
        wait_for(lambda: _problems(server, "has run a batch of 1 for"))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    line = line_of(server, waiting.result())
    assert re.fullmatch(
        r"Worker \d+ began with it after .* of .*: its process was stopped or busy, or reading "
        "5 bytes.",
        line["explanation"],
    )


def test_a_restarting_worker_is_found_as_the_cause(server, install, gate, background, wait_for):
    name = install()
    holds = background(server.ask, name, id="first", gate=gate.path)
    gate.wait_entered()
    waiting = background(server.ask, name, id="second")
    server.wait_queued(name, 1)
    os.kill(server.worker(name)["pid"], signal.SIGKILL)
    gate.open_for_all()  # the first is tried again
    assert (holds.result().status_code, waiting.result().status_code) == (200, 200)
    line = line_of(server, waiting.result())
    assert "for a worker: 1 of 1 was not ready (1 failed)" in line["explanation"]
    first = line_of(server, holds.result())
    assert first["attempts"] == 2
    assert "the worker that had it died, and it ran 2 times" in first["explanation"]


def test_a_full_queue_is_found_as_the_cause(server, install, gate, background):
    name = install(job_queue_size=1)
    holds = background(server.ask, name, id="first", gate=gate.path)
    gate.wait_entered()
    waiting = background(server.ask, name, id="second")
    server.wait_queued(name, 1)
    capacity = server.metrics("marserve_free_capacity")
    refused = server.ask(name, id="third")
    assert refused.status_code == 503
    (line,) = lines(server, failed=5, model=name)
    assert (line["id"], line["outcome"]) == (refused.headers["x-request-id"], "refused")
    assert line["explanation"].startswith("The queue is full: 1 requests wait for 1 busy worker.")
    assert refused.json()["message"].endswith(line["explanation"])  # it begins as TorchServe's
    assert [count for series, count in capacity.items() if f'"{name}"' in series] == [0]
    assert any("the queue was full" in text for text in _problems(server, name))
    gate.open()
    assert (holds.result().status_code, waiting.result().status_code) == (200, 200)


def test_a_model_that_cannot_load_is_found_as_the_cause(server, install, wait_for):
    name = install(handler="import no_such_package\n", initial_workers=0)
    server.management("PUT", f"/models/{name}", params={"min_worker": 1})
    wait_for(lambda: "no_such_package" in server.worker(name).get("lastError", ""))
    assert server.ask(name, id=1).status_code == 503
    (line,) = lines(server, failed=5, model=name)
    assert line["explanation"].startswith("Its worker has failed: ")
    assert "no_such_package" in line["explanation"]


def test_a_failing_node_of_a_workflow_is_found_with_its_exception(server, install_workflow):
    functions = (
        "def first(data, context):\n    assert data is None, 'no input'\n\n\nsecond = first\n"
    )
    workflow = install_workflow(WORKFLOW, functions)
    answer = server.inference("POST", f"/wfpredict/{workflow}", data=b"x")
    assert "no input" not in answer.text
    (line,) = lines(server, failed=5, model=workflow)
    assert line["explanation"].endswith("ms: Error executing first: AssertionError: no input")


def test_a_failing_handler_is_found_with_its_exception(server, install):
    name = install()
    answer = server.ask(name, id=1, do="raise")
    assert "secret" not in answer.text
    (line,) = lines(server, failed=5, model=name)
    assert line["error"] == "ValueError: the secret of the handler"
    assert line["explanation"].endswith(": ValueError: the secret of the handler")
    (problem,) = _problems(server, f"of {name} failed in the last minute")
    assert problem.endswith("The last error: ValueError: the secret of the handler")
    counted = server.metrics("marserve_failed_requests_total")
    assert [
        n for series, n in counted.items() if f'"{name}"' in series and "handler" in series
    ] == [1]


def test_an_expired_request_and_a_client_that_leaves_have_a_line(
    server, install, gate, background, wait_for
):
    name = install()
    holds = background(server.ask, name, id="first", gate=gate.path)
    gate.wait_entered()
    expired = send(server, name, b"{}", **{"x-timeout-ms": "50"})
    assert expired.status_code == 504
    assert line_of(server, expired)["explanation"].startswith("It expired after")
    with server.connect("inference") as connection:
        head = f"POST /predictions/{name} HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
        connection.sendall(head.encode() + b"{}")
        server.wait_queued(name, 1)
    (line,) = wait_for(
        lambda: [each for each in lines(server, model=name) if each["outcome"] == "cancelled"]
    )
    assert (line["status"], events(line)) == (499, ["received", "queued", "answered"])
    gate.open()
    assert holds.result().status_code == 200


def test_a_stream_has_the_moment_of_its_first_piece(server, install, handlers):
    name = install(handler=handlers / "streamer.py")
    answer = server.predict(name, json={"id": "a", "pieces": 2})
    assert "first piece" in events(line_of(server, answer))


def test_a_stream_that_joins_a_running_batch_is_answered_and_has_a_line(
    server, install, handlers, record, make_gate, background
):
    config = "continuousBatching: true\nbatchSize: 2\nmaxBatchDelay: 1\n"
    name = install(config, handler=handlers / "stepper.py")
    gate = make_gate()

    def ask(client, until, **orders):
        order = {"name": client, "until": until, "record": str(record), **orders}
        return server.predict(name, json=order)

    first = background(ask, "a", 4, gate=gate.path)
    gate.wait_entered()
    second = background(ask, "b", 3)
    server.wait_queued(name, 1)
    gate.open()
    assert (first.result().content, second.result().content) == (b"a1;a2;a3;a4;", b"b1;b2;b3;")
    line = line_of(server, second.result())
    assert (line["outcome"], line["batch"]["size"]) == ("answered", 1)
    assert {"batch closed", "handler started", "first piece"} <= {*events(line)}
    assert line["shares"]["waitingMs"] > line["shares"]["handlerMs"] > 0


def test_nodes_of_a_workflow_and_calls_of_models_are_nested(server, install_workflow, handlers):
    functions = "def first(data, context):\n    return data and [b'1']\n\n\n"
    workflow = install_workflow(WORKFLOW, functions + functions.replace("first", "second"))
    answer = server.inference("POST", f"/wfpredict/{workflow}", data=b"x")
    assert answer.status_code == 200, answer.text
    line = line_of(server, answer)
    assert line["modelName"] == workflow
    assert [each["modelName"] for each in line["nested"]] == [
        f"{workflow}__first",
        f"{workflow}__second",
    ]
    assert "were in 2 nodes, the longest in" in line["explanation"]


def test_a_list_has_a_part_of_the_nested_requests_and_a_request_by_id_has_all(
    server, install_workflow
):
    names = [f"n{number}" for number in range(13)]
    dag = "models: {}\ndag: {n0: [" + ", ".join(names[1:]) + "]}\n"
    functions = "def n0(data, context):\n    return data and [b'1']\n\n\n"
    workflow = install_workflow(dag, functions + " = ".join([*names[1:], "n0"]) + "\n")
    answer = server.inference("POST", f"/wfpredict/{workflow}", data=b"x")
    assert answer.status_code == 200, answer.text
    whole = line_of(server, answer)
    assert len(whole["nested"]) == 13
    assert "nestedLeftOut" not in whole
    listed = server.management("GET", f"/requests?model={workflow}")
    assert b"\n" not in listed.content
    (line,) = listed.json()["requests"]
    assert (len(line["nested"]), line["nestedLeftOut"]) == (10, 3)


def test_server_timing_is_sent_on_request(server, install):
    name = install()
    plain = server.ask(name, id=1)
    assert "server-timing" not in plain.headers
    for path in (f"/predictions/{name}", f"/v1/models/{name}:predict"):
        answer = server.inference(
            "POST", path, json={"id": 1, "instances": [1]}, headers={"X-Server-Timing": "1"}
        )
        timing = dict(re.findall(r"(\w+);dur=([0-9.]+)", answer.headers["server-timing"]))
        line = line_of(server, answer)
        assert float(timing["total"]) == pytest.approx(line["tookMs"], abs=0.01)
        assert float(timing["handler"]) == pytest.approx(line["shares"]["handlerMs"], abs=0.01)
    missing = server.inference("POST", "/predictions/nobody", headers={"X-Server-Timing": "1"})
    assert (missing.status_code, "server-timing" in missing.headers) == (404, False)


# -- events ----------------------------------------------------------------------------------------


def test_events_have_all_models_and_the_new_batches_of_one(server, install):
    name = install(batch_size=2)
    server.ask(name, id=1)
    with server.management("GET", f"/dashboard/events?model={name}", stream=True) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        received = _events(answer)
        kind, overview = next(received)
        assert kind == "overview"
        (card,) = [each for each in overview["models"] if each["modelName"] == name]
        assert card["workers"] == {
            "ready": 1,
            "min": 1,
            "max": 1,
            "restarting": 0,
            "givenUp": 0,
            "crashLoop": 0,
        }
        kind, model = next(received)
        assert (kind, len(model["batches"])) == ("model", 1)
        assert model["workers"][0]["events"][-1]["state"] == "ready"
        server.ask(name, id=2)
        later = (document["batches"] for kind, document in received if kind == "model")
        assert [each["size"] for each in next(filter(None, later))] == [1]
    missing = server.management("GET", "/dashboard/events?model=nobody")
    assert missing.status_code == 404


def test_each_watcher_gets_each_change_once(server, install):
    name = install()
    seen = []
    with contextlib.ExitStack() as opened:
        for id_ in range(3):
            server.ask(name, id=id_)
            path = f"/dashboard/events?model={name}"
            answer = opened.enter_context(server.management("GET", path, stream=True))
            seen.append(_events(answer))
        server.ask(name, id=3)
        for received in seen:
            kinds, batches = set(), []
            while len(batches) < 4:
                kind, document = next(received)
                if kind in kinds:  # not the first, which has all
                    assert "server" not in document
                    assert "modelName" not in document
                    assert name not in document.get("gone", ())
                kinds.add(kind)
                batches += document.get("batches", ())
            assert len({each["closedAt"] for each in batches}) == len(batches) == 4
        assert server.management("DELETE", f"/models/{name}").status_code == 200


def test_an_overview_tells_which_models_have_changed_or_gone(server, install):
    idle, busy = install(), install()
    with server.management("GET", "/dashboard/events", stream=True) as answer:
        received = _events(answer)
        _, first = next(received)
        assert {idle, busy} <= {each["modelName"] for each in first["models"]}
        later = (document for _, document in received)
        changed = {idle}
        while idle in changed or busy not in changed:
            # All change when the samples of their traffic are taken, every five seconds.
            server.ask(busy, id=1)
            changed = {model["modelName"] for model in next(later)["models"]}
        assert server.management("DELETE", f"/models/{idle}").status_code == 200
        assert next(each["gone"] for each in later if each["gone"]) == [[idle, "1.0"]]


def test_events_of_a_model_end_when_it_is_unregistered(server, install):
    name = install()
    with server.management("GET", f"/dashboard/events?model={name}", stream=True) as answer:
        received = _events(answer)
        next(received)
        assert server.management("DELETE", f"/models/{name}").status_code == 200
        assert name not in [each["modelName"] for each in list(received)[-1][1].get("models", ())]


def test_a_crash_loop_is_a_problem_although_a_worker_is_ready_again(server, install):
    name = install()
    for _ in range(2):
        server.kill_worker(name)
    assert server.ask(name, do="garbage").status_code == 200
    server.kill_worker(name, signal.SIGSEGV)
    assert server.ask(name, id=2).status_code == 200
    worker = server.worker(name)
    assert worker["status"] == "READY"
    assert worker["lastError"] == "Worker disconnected. Its process was killed by SIGSEGV."
    assert server.describe(name)["crashLoop"] == 3
    (problem,) = _problems(server, f"The workers of {name} have failed 3 times")
    assert "Its process was killed by SIGSEGV. Its last output: " in problem
    assert "the last of the garbage" in problem


def test_a_status_of_the_handler_is_counted_once(server, install):
    name = install()
    assert server.ask(name, id=1, status=[503, ""]).status_code == 503
    (problem,) = _problems(server, f"of {name} failed in the last minute")
    assert problem.startswith(f"1 of 1 requests of {name} failed")
    (line,) = lines(server, failed=5, model=name)
    assert line["explanation"].endswith(": status 503")


def test_data_and_predictions_need_the_key_of_management_and_the_page_does_not(start_server):
    with start_server(disable_token_authorization="false") as server:
        keys = json.loads((server.directory / "key_file.json").read_text())
        for path in ("/requests", "/dashboard/events", "/dashboard/predictions/m"):
            method = "POST" if "predictions" in path else "GET"
            assert server.management(method, path).json()["type"] == "InvalidKeyException"
            wrong = {"Authorization": f"Bearer {keys['inference']['key']}"}
            assert server.management(method, path, headers=wrong).status_code == 400
        right = {"Authorization": f"Bearer {keys['management']['key']}"}
        assert server.management("GET", "/requests", headers=right).json() == {"requests": []}
        page = server.management("GET", "/dashboard")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        for path in ("/dashboard/../endpoints.py", "/dashboard/%2e%2e/server.py", "/dashboard/x"):
            assert server.exchange(
                "management", f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), b"404"
            )


def test_a_prediction_of_the_dashboard_hides_its_key_from_the_handler(server, install):
    source = "def handle(data, context):\n    return data and [context.get_all_request_header(0)]\n"
    server.install(source, "headers")
    sent = {"Authorization": "Basic c2VjcmV0", "X-Mine": "1"}
    answer = server.management("POST", "/dashboard/predictions/headers", data=b"x", headers=sent)
    assert answer.status_code == 200, answer.text
    seen = {name.lower(): value for name, value in answer.json().items()}
    assert seen["x-mine"] == "1"
    assert "authorization" not in seen
    assert server.management("GET", "/dashboard/predictions/headers").status_code == 405
    assert server.management("POST", "/dashboard/predictions/nobody").status_code == 404


def _events(answer):
    kind = ""
    for text in answer.iter_lines():
        if text.startswith(b"event: "):
            kind = text.removeprefix(b"event: ").decode()
        elif text.startswith(b"data: "):
            yield kind, json.loads(text.removeprefix(b"data: "))


def _problems(server, part):
    with server.management("GET", "/dashboard/events", stream=True) as answer:
        _, overview = next(_events(answer))
    return [each["text"] for each in overview["problems"] if part in each["text"]]
