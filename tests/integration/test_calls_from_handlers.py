"""`context.infer`: handlers that are coroutines call other models, and nothing is left of it."""

import os
import signal

import pytest

pytestmark = pytest.mark.integration

ASYNC = "asyncCommunication: true\n"


@pytest.fixture(scope="module")
def models(server, handlers):
    """Callers ``a``, ``b`` and ``c``, and the lab, which does what it is told."""
    for name in "abc":
        server.install(handlers / "caller.py", name, ASYNC)
    server.install(handlers / "lab.py", "lab")


@pytest.fixture(autouse=True)
def nothing_left(server, models, wait_for):
    """After each test no model has a request, and every worker is READY."""
    yield
    if not server.is_running:
        return
    wait_for(
        lambda: not any(server.metrics("marserve_open_requests").values()),
        what=lambda: server.metrics("marserve_open_requests"),
    )
    for name in ("a", "b", "c", "lab"):
        server.wait_queued(name, 0)
        server.wait_workers(name, "READY")


def lab(**orders):
    return {"model": "lab", "data": orders}


def calling(model, *calls, **orders):
    return {"model": model, "data": {"calls": calls, **orders}}


def message_of(answer):
    return answer.json()["message"]


def test_a_fan_out_and_a_chain(server):
    answer = server.ask("a", calls=[lab(id=1), calling("b", lab(id=2), calling("c", lab(id=3)))])
    one, two, three = ({"id": id_, "batch": 1} for id_ in (1, 2, 3))
    assert answer.json() == [one, [two, [three]]]


def test_calls_share_a_batch(server, handlers):
    server.install(handlers / "lab.py", "wide", "batchSize: 4\nmaxBatchDelay: 5000\n")
    calls = [{"model": "wide", "data": {"id": id_}} for id_ in range(4)]
    answer = server.ask("a", calls=calls)
    assert answer.json() == [{"id": id_, "batch": 4} for id_ in range(4)]


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        ({"data": "text"}, "{'body': 'text'}"),
        ({"data": {"a": [1]}}, "{'body': {'a': [1]}}"),
        ({"data": "{}", "headers": {"content-type": "application/json"}}, "{'body': {}}"),
        ({"parts": {"name": "a", "top": 5}}, "{'name': 'a', 'top': 5}"),
        ({}, "{'body': bytearray(b'')}"),
    ],
)
def test_what_the_called_handler_gets(server, arguments, body):
    source = "def handle(data, context):\n    return data and [repr(row) for row in data]\n"
    if not server.is_known("mirror"):
        server.install(source, "mirror")
    assert server.ask("a", calls=[{"model": "mirror", **arguments}]).json() == [body]


def test_megabytes_go_there_and_come_back(server):
    source = "def handle(data, context):\n    return data and [row['body'] for row in data]\n"
    server.install(
        source,
        "echo",
    )
    text = "x" * 5_000_000
    assert server.ask("a", calls=[{"model": "echo", "data": text}]).json() == [text]


def test_an_answer_in_pieces_comes_whole(server, handlers):
    server.install(handlers / "juggler.py", "juggler", ASYNC)
    order = {"id": "p", "pieces": 3}
    assert server.ask("a", calls=[{"model": "juggler", "data": order}]).json() == ["p0;p1;pend"]


def test_a_handler_that_answers_in_pieces_calls_models(server):
    answer = server.ask("a", piece="first ", calls=[lab(answer="x")])
    assert answer.text == 'first [\n  "x"\n]'


def test_models_that_would_wait_for_themselves(server):
    alone = server.ask("a", calls=[calling("a")])
    assert alone.status_code == 500
    assert "508: The model would wait for itself: a 1.0 -> a 1.0." in message_of(alone)
    circle = server.ask(
        "a", calls=[calling("b", calling("c", calling("b", catch=True), catch=True))]
    )
    ((failure,),) = circle.json()[0]
    assert failure == {
        "status": 508,
        "reason": "The model would wait for itself: a 1.0 -> b 1.0 -> c 1.0 -> b 1.0.",
        "type": "LoopDetectedException",
    }


def test_models_that_call_each_other_do_not_wait_for_ever(server, handlers, together):
    """Each has one place, and one request in it, which calls the other."""
    config = ASYNC + "outstandingBatches: 1\n"
    for name in ("this", "that"):
        server.install(handlers / "caller.py", name, config)
    asked = [
        lambda one=one, other=other: server.ask(one, calls=[calling(other)], catch=True, timeout=10)
        for one, other in [("this", "that"), ("that", "this")] * 10
    ]
    for answer in together(asked):
        (result,) = answer.json()
        assert result == [] or result["status"] == 503, result


IN_TURN = """
async def handle(data, context):
    steps = data[0]["body"] if data else []
    said = []
    for step in steps:
        try:
            answer = await context.infer(step["model"], step["data"], headers=step.get("headers"))
            said.append(answer.status)
        except Exception as error:
            said.append(error.status)
    return [said]
"""


def test_a_call_does_not_wait_for_ever_behind_another_of_its_sequence(server, gate, background):
    """One waits for the turn of a sequence, whose turn waits for the place of the first."""
    server.install(IN_TURN, "placed", ASYNC + "outstandingBatches: 1\n")
    stateful = "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxNumSequence: 9\n"
    server.install(IN_TURN, "turned", ASYNC + stateful)
    sequence = {"ts_request_sequence_id": "s"}
    back = {"model": "turned", "data": [], "headers": sequence}
    first = background(server.predict, "placed", json=[lab(gate=gate.path), back], timeout=10)
    gate.wait_entered()
    steps = [{"model": "placed", "data": []}]
    second = background(server.predict, "turned", json=steps, headers=sequence, timeout=10)
    server.wait_queued("placed", 1)
    gate.open()
    assert first.result().json() == [200, 503]
    assert second.result().json() == [200]


def test_a_failure_is_the_handlers_to_catch(server):
    calls = [
        {"model": "nobody"},
        {"model": "lab", "version": "7.0"},
        lab(status=[415, "Odd"], answer="It is odd."),
        lab(do="refuse", message="Not this.", code=422),
        lab(do="raise"),
        lab(do="os._exit"),
    ]
    failures = server.ask("a", calls=calls, catch=True).json()
    assert [(each["status"], each["reason"].partition(". The ")[0]) for each in failures] == [
        (404, "Model not found: nobody"),
        (404, "Model version: 7.0 does not exist for model: lab"),
        (415, "It is odd."),
        (422, "Not this."),
        (503, "Prediction failed"),
        (500, "Worker died. Its process ended with exit status 3."),
    ]
    assert [failure["type"] for failure in failures[:2]] == [
        "ModelNotFoundException",
        "ModelVersionNotFoundException",
    ]


@pytest.mark.parametrize("group", [{}, {"group": True}])
def test_a_failure_that_is_not_caught_reaches_the_client(server, group):
    answer = server.ask("a", calls=[{"model": "nobody"}], **group)
    assert answer.status_code == 500
    assert (
        message_of(answer) == 'The call of model "nobody" failed with 404: Model not found: nobody'
    )
    assert server.ask("a", calls=[lab(status=[415, "Odd"])], **group).status_code == 415
    assert server.ask("a", calls=[lab(do="memory")], **group).status_code == 507


def test_a_model_without_workers_is_503(server, handlers):
    server.install(handlers / "lab.py", "idle", initial_workers=0)
    (failure,) = server.ask("a", calls=[{"model": "idle"}], catch=True).json()
    assert failure["status"] == 503
    assert "has no worker" in failure["reason"]


def test_a_call_has_the_time_that_its_request_has(server, gate, record, background):
    """The client's time ends the call at once, also one that waits in the queue."""
    held = background(lambda: server.ask("lab", gate=gate.path))
    gate.wait_entered()
    hurry = {"X-Timeout-Ms": "300"}
    order = {"calls": [lab(id="late", record=str(record))]}
    late = background(lambda: server.predict("a", json=order, headers=hurry))
    server.wait_queued("lab", 1)
    assert late.result().status_code == 504
    server.wait_queued("lab", 0)
    gate.open()
    assert held.result().status_code == 200
    assert record.read_text() == ""


def test_a_call_may_have_less_time_than_its_request(server, gate, background):
    held = background(lambda: server.ask("lab", gate=gate.path))
    gate.wait_entered()
    call = {**lab(id="late"), "timeout": 0.05}
    (failure,) = server.ask("a", calls=[call], catch=True).json()
    assert (failure["status"], failure["reason"]) == (504, "No prediction within 50 ms.")
    assert server.ask("a", calls=[lab()], patience=0.05).json() == ["impatient"]
    server.wait_queued("lab", 0)
    gate.open()
    assert held.result().status_code == 200


def test_a_client_that_leaves_takes_its_calls_along(server, gate, background, record):
    held = background(lambda: server.ask("lab", gate=gate.path))
    gate.wait_entered()
    body = b'{"calls": [{"model": "b", "data": {"calls": [%s]}}]}' % (
        b'{"model": "lab", "data": {"id": "gone", "record": "%s"}}' % str(record).encode()
    )
    head = b"POST /predictions/a HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with server.connect("inference") as connection:
        connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.wait_queued("lab", 1)
    server.wait_queued("lab", 0)
    gate.open()
    assert held.result().status_code == 200
    assert record.read_text() == ""


def test_a_handler_that_fails_after_some_of_its_calls(server, gate, background, record):
    """The calls for which nobody waits any more never reach a worker."""
    held = background(lambda: server.ask("lab", gate=gate.path))
    gate.wait_entered()
    waiting = [lab(id="left", record=str(record)) for _ in range(3)]
    failed = server.ask("a", calls=[*waiting, calling("b")], fail=True)
    assert failed.status_code == 503
    assert message_of(failed).startswith("Prediction failed. ")
    server.wait_queued("lab", 0)
    gate.open()
    assert held.result().status_code == 200
    assert record.read_text() == ""


def test_a_call_that_outlives_its_request(server, gate, background):
    held = background(lambda: server.ask("lab", gate=gate.path))
    gate.wait_entered()
    assert server.ask("a", calls=[lab()], leave=True).json() == []
    assert "RuntimeError: The request" in server.ask("a", left=True).text
    server.wait_queued("lab", 0)
    gate.open()
    assert held.result().status_code == 200


def kill(server, name):
    os.kill(server.worker(name)["pid"], signal.SIGKILL)


def test_the_callers_worker_is_killed(server, gate, background, record):
    """What its requests had called is cancelled, and called again by the next worker."""
    held = background(lambda: server.ask("lab", gate=gate.path))
    gate.wait_entered()
    waiting = background(lambda: server.ask("a", calls=[lab(id="x", record=str(record))]))
    server.wait_queued("lab", 1)
    kill(server, "a")
    assert not waiting.done()
    server.wait_logged("ts_log.log", "-a_1.0 State change WORKER_STOPPED -> WORKER_STARTED")
    server.wait_queued("lab", 1)
    gate.open()
    assert held.result().status_code == 200
    assert waiting.result().json() == [{"id": "x", "batch": 1}]
    assert record.read_text() == "x\n"


def test_the_called_models_worker_is_killed(server, gate, background):
    """The call is run once more by the next worker, as for any client."""
    asked = background(lambda: server.ask("a", calls=[lab(id="x", gate=gate.path)]))
    gate.wait_entered()
    kill(server, "lab")
    gate.open_for_all()
    assert asked.result().json() == [{"id": "x", "batch": 1}]


def test_both_workers_are_killed(server, gate, background):
    asked = background(lambda: server.ask("a", calls=[lab(id="x", gate=gate.path)]))
    gate.wait_entered()
    kill(server, "lab")
    kill(server, "a")
    gate.open_for_all()
    assert asked.result().status_code == 200


def test_a_hundred_callers_at_once(server, handlers, together):
    server.install(handlers / "lab.py", "roomy", "jobQueueSize: 1000\n")

    def leaf(number):
        return {"model": "roomy", "data": {"id": number}}

    asked = [
        lambda n=n: server.ask("a", calls=[calling("b", leaf(n)), leaf(-n)]) for n in range(1, 101)
    ]
    for n, answer in enumerate(together(asked), 1):
        assert answer.json() == [[{"id": n, "batch": 1}], {"id": -n, "batch": 1}]


def test_the_called_model_is_unregistered_in_between(server, handlers, gate, background):
    """The call that it has accepted is answered, the next one is 404."""
    server.install(handlers / "lab.py", "short")
    first = {"model": "short", "data": {"id": 1, "gate": gate.path}}
    asked = background(
        lambda: server.ask("a", calls=[first, {"model": "short", "data": {"id": 2}}])
    )
    gate.wait_entered()
    server.wait_queued("short", 1)
    gone = background(lambda: server.management("DELETE", "/models/short"))
    while server.is_known("short"):
        pass
    (failure,) = server.ask("a", calls=[first], catch=True).json()
    assert failure["status"] == 404
    gate.open()
    assert [each["id"] for each in asked.result().json()] == [1, 2]
    assert gone.result().status_code == 200


def test_a_model_that_is_unregistered_calls_others_to_its_end(server, handlers, gate, background):
    server.install(handlers / "caller.py", "last", ASYNC)
    then = calling("b", lab(id="x", gate=gate.path))
    asked = background(lambda: server.ask("last", calls=[then]))
    gate.wait_entered()
    gone = background(lambda: server.management("DELETE", "/models/last"))
    while server.is_known("last"):
        pass
    gate.open()
    assert asked.result().json() == [[{"id": "x", "batch": 1}]]
    assert gone.result().status_code == 200


def test_the_server_stops_while_calls_are_under_way(start_server, handlers, make_gate, background):
    """What was accepted is answered, with calls that are made while it stops."""
    first, second = make_gate(), make_gate()
    source = """
async def handle(data, context):
    if data is None:
        return
    await context.infer("lab", {"gate": data[0]["body"]["first"]})
    answer = await context.infer("lab", {"id": "later", "gate": data[0]["body"]["second"]})
    return [answer.json()]
"""
    with start_server() as server:
        server.install(source, "a", ASYNC)
        server.install(handlers / "lab.py", "lab")
        orders = {"first": first.path, "second": second.path}
        asked = background(lambda: server.ask("a", **orders))
        first.wait_entered()
        server.terminate()
        server.wait_logged("ts_log.log", "Stopping; accepted requests have")
        first.open()
        second.open()
        assert asked.result().json() == {"id": "later", "batch": 1}
        server.wait_stopped()


def test_a_stop_that_gives_accepted_requests_up(start_server, handlers, gate, background):
    with start_server(drain_timeout="0") as server:
        server.install(handlers / "caller.py", "a", ASYNC)
        server.install(handlers / "lab.py", "lab")
        asked = background(lambda: server.ask("a", calls=[lab(gate=gate.path)]))
        gate.wait_entered()
        server.stop()
        assert asked.result().status_code == 500
