"""Which requests travel together, when they leave, and which never do."""

import time

import pytest
from grpc_client import connected, failure

pytestmark = pytest.mark.integration

NO_WORKER = (
    'Model "{}"{} has no worker to serve inference request. Please use scale workers API to add '
    "workers. If this is a sequence inference, please check if it is closed, or expired; or "
    "exceeds maxSequenceJobQueueSize"
)
NEVER = 60_000  # ms: a window that no test waits for


def batch_sizes(server, name):
    """Upper bound of the size to the number of batches up to it."""
    samples = server.metrics("marserve_batch_size_bucket")
    return {
        series.partition('le="')[2].partition('"')[0]: count
        for series, count in samples.items()
        if f'"{name}"' in series
    }


def test_a_full_batch_leaves_at_once_and_as_one(server, install, together):
    name = install(batch_size=8, max_batch_delay=NEVER)
    answers = together([lambda i=i: server.ask(name, id=i) for i in range(8)])
    assert [answer.json() for answer in answers] == [{"id": i, "batch": 8} for i in range(8)]
    sizes = batch_sizes(server, name)
    assert (sizes["4.0"], sizes["8.0"], sizes["+Inf"]) == (0, 1, 1)


def test_a_lone_request_waits_for_its_window(server, install):
    name = install(batch_size=4, max_batch_delay=300)
    began = time.monotonic()
    assert server.ask(name, id=1).json() == {"id": 1, "batch": 1}
    assert 0.3 <= time.monotonic() - began < 2


def test_those_in_the_window_leave_together(server, install, background):
    name = install(batch_size=4, max_batch_delay=600)
    answers = [background(server.ask, name, id=i) for i in range(3)]
    assert [answer.result().json()["batch"] for answer in answers] == [3, 3, 3]


def test_batch_size_1_never_waits(server, install):
    name = install(batch_size=1, max_batch_delay=NEVER)
    assert server.ask(name, id=1).json() == {"id": 1, "batch": 1}


def test_without_delay_a_batch_takes_what_is_there(server, install, background, gate):
    name = install(batch_size=8, max_batch_delay=0)
    first = background(server.ask, name, id=0, gate=gate.path)
    gate.wait_entered()
    rest = [background(server.ask, name, id=i) for i in range(1, 6)]
    server.wait_queued(name, 5)
    gate.open()
    assert first.result().json()["batch"] == 1
    assert [answer.result().json()["batch"] for answer in rest] == [5] * 5


def test_first_in_first_out(server, install, background, gate, record):
    name = install(batch_size=2, max_batch_delay=0)
    answers = [background(server.ask, name, id=0, record=str(record), gate=gate.path)]
    gate.wait_entered()
    for number in range(1, 8):
        answers.append(background(server.ask, name, id=number, record=str(record)))
        server.wait_queued(name, number)
    gate.open()
    assert all(answer.result().status_code == 200 for answer in answers)
    assert record.read_text().split() == list("01234567")


def test_two_workers_work_at_the_same_time(server, install, background, make_gate):
    name = install(initial_workers=2)
    gates = [make_gate(), make_gate()]
    answers = [background(server.ask, name, gate=gate.path) for gate in gates]
    for gate in gates:
        gate.wait_entered()
    for gate in gates:
        gate.open()
    assert [answer.result().status_code for answer in answers] == [200, 200]


def test_beyond_the_bound_of_the_queue(server, install, background, gate):
    name = install("jobQueueSize: 2\n")
    accepted = [background(server.ask, name, id=0, gate=gate.path)]
    gate.wait_entered()
    accepted += [background(server.ask, name, id=i) for i in (1, 2)]
    server.wait_queued(name, 2)
    why = (
        ". The queue is full: 2 requests wait for 1 busy worker. Try again later, add workers, or "
        "set a larger jobQueueSize (2) in model-config.yaml or with PUT "
        f"/models/{name}?job_queue_size=NUMBER."
    )
    for path, version in ((name, ""), (f"{name}/1.0", ' Version 1.0"')):
        refused = server.ask(path, id=3)
        assert refused.status_code == 503
        assert refused.json() == {
            "code": 503,
            "type": "ServiceUnavailableException",
            "message": NO_WORKER.format(name, version) + why,
        }
    with connected(server) as client:
        code, text = failure(lambda: client.predict(name))
    assert code == "RESOURCE_EXHAUSTED"
    assert text == f"{NO_WORKER.format(name, '')}{why}\nInternalServerException.()"
    gate.open()
    assert [answer.result().status_code for answer in accepted] == [200, 200, 200]


def test_a_model_without_workers(server, install):
    name = install(initial_workers=0)
    answer = server.ask(name, id=1)
    assert answer.status_code == 503
    assert answer.json()["message"] == NO_WORKER.format(name, "")


def send_and_keep(server, name, order: bytes):
    connection = server.connect("inference")
    connection.sendall(
        b"POST /predictions/%b HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (name.encode(), len(order), order)
    )
    return connection


def test_who_leaves_while_queued_never_reaches_the_handler(
    server, install, background, gate, record
):
    name = install()
    first = background(server.ask, name, id="first", record=str(record), gate=gate.path)
    gate.wait_entered()
    order = b'{"id": "gone", "record": "%b"}' % str(record).encode()
    with send_and_keep(server, name, order):
        server.wait_queued(name, 1)
    server.wait_queued(name, 0)
    gate.open()
    assert first.result().status_code == 200
    assert server.ask(name, id="last", record=str(record)).status_code == 200
    assert record.read_text().split() == ["first", "last"]


def test_who_leaves_while_being_served_harms_nobody(server, install, gate):
    name = install()
    with send_and_keep(server, name, b'{"gate": "%b"}' % gate.path.encode()):
        gate.wait_entered()
    gate.open()
    assert server.ask(name, id=1).json() == {"id": 1, "batch": 1}


def test_who_leaves_a_batch_does_not_touch_the_others(server, install, background):
    name = install(batch_size=3, max_batch_delay=NEVER)
    with send_and_keep(server, name, b'{"id": "gone"}'):
        server.wait_queued(name, 1)
    server.wait_queued(name, 0)
    answers = [background(server.ask, name, id=i) for i in range(3)]
    assert [answer.result().json()["batch"] for answer in answers] == [3, 3, 3]


def test_past_its_client_timeout_a_request_is_answered_and_goes_nowhere(
    server, install, background, gate, record
):
    name = install("clientTimeoutInMills: 500\n")
    served = background(server.ask, name, id="served", record=str(record), gate=gate.path)
    gate.wait_entered()
    queued = background(server.ask, name, id="queued", record=str(record))
    for answer in (served.result(), queued.result()):
        assert answer.status_code == 504
        assert answer.json() == {
            "code": 504,
            "type": "RequestTimeoutException",
            "message": "No prediction within clientTimeoutInMills=500.",
        }
    gate.open()
    assert server.ask(name, id="last", record=str(record)).status_code == 200
    assert record.read_text().split() == ["served", "last"]


def test_explanations_and_predictions_never_share_a_batch(server, together):
    source = (
        "def handle(data, context):\n"
        "    values = [context.get_request_header(i, 'explain') for i in range(len(data or []))]\n"
        "    return [' '.join(values)] * len(values)\n"
    )
    server.install(source, "mixed", batch_size=4, max_batch_delay=300)
    calls = [
        lambda path=path: server.inference("POST", f"/{path}/mixed").text
        for path in ("predictions", "explanations") * 2
    ]
    for values in together(calls):
        assert len(set(values.split())) == 1
