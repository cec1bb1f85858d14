"""Requests whose time is over are answered at that time, and are in nobody's way after it."""

import time

import pytest

pytestmark = pytest.mark.integration

NEVER = 60_000  # ms: a window that no test waits for
LATE = 2.0  # s: how much later than due an answer may be on a busy machine


def ask_within(server, name, milliseconds, **orders):
    """The answer, and the seconds it took."""
    began = time.monotonic()
    answer = server.predict(name, json=orders, headers={"X-Timeout-Ms": str(milliseconds)})
    return answer, time.monotonic() - began


def assert_expired(answered, milliseconds):
    answer, seconds = answered
    assert answer.status_code == 504
    assert answer.json() == {
        "code": 504,
        "type": "RequestTimeoutException",
        "message": f"No prediction within X-Timeout-Ms={milliseconds}.",
    }
    assert milliseconds / 1000 <= seconds < milliseconds / 1000 + LATE


def test_who_expires_in_the_queue_is_answered_and_leaves_its_seat(
    server, install, background, gate, record
):
    name = install("jobQueueSize: 1\n")
    first = background(server.ask, name, id="first", record=str(record), gate=gate.path)
    gate.wait_entered()
    queued = background(ask_within, server, name, 400, id="late", record=str(record))
    server.wait_queued(name, 1)
    assert server.ask(name).status_code == 503
    assert_expired(queued.result(), 400)
    last = background(server.ask, name, id="last", record=str(record))
    server.wait_queued(name, 1)
    gate.open()
    assert [answer.result().status_code for answer in (first, last)] == [200, 200]
    assert record.read_text().split() == ["first", "last"]


def test_who_expires_in_a_worker_does_not_touch_the_others(server, install, background, gate):
    name = install(batch_size=2, max_batch_delay=NEVER)
    mate = background(server.ask, name, id="mate", gate=gate.path)
    server.wait_queued(name, 1)
    assert_expired(ask_within(server, name, 300, id="late"), 300)
    gate.open()
    assert mate.result().json() == {"id": "mate", "batch": 2}


def test_who_expires_in_an_open_window_does_not_count_for_the_batch(server, install, together):
    name = install(batch_size=3, max_batch_delay=NEVER)
    assert_expired(ask_within(server, name, 200, id="late"), 200)
    answers = together([lambda i=i: server.ask(name, id=i) for i in range(3)])
    assert [answer.json()["batch"] for answer in answers] == [3, 3, 3]


def test_who_leaves_the_queue_leaves_a_seat(server, install, background, gate):
    name = install("jobQueueSize: 1\n")
    first = background(server.ask, name, gate=gate.path)
    gate.wait_entered()
    with server.connect("inference") as connection:
        connection.sendall(
            f"POST /predictions/{name} HTTP/1.1\r\nHost: a\r\nX-Timeout-Ms: {NEVER}\r\n"
            "Content-Length: 0\r\n\r\n".encode()
        )
        server.wait_queued(name, 1)
        assert server.ask(name).status_code == 503
    server.wait_queued(name, 0)
    second = background(server.ask, name, id=2)
    server.wait_queued(name, 1)
    gate.open()
    assert [answer.result().status_code for answer in (first, second)] == [200, 200]


@pytest.mark.parametrize(
    ("milliseconds", "decides"),
    [(NEVER, "clientTimeoutInMills=400"), (200, "X-Timeout-Ms=200")],
)
def test_a_client_may_only_shorten_its_time(server, install, gate, milliseconds, decides):
    name = install("clientTimeoutInMills: 400\n")
    answer, seconds = ask_within(server, name, milliseconds, gate=gate.path)
    assert (answer.status_code, answer.json()["message"]) == (
        504,
        f"No prediction within {decides}.",
    )
    due = int(decides.partition("=")[2]) / 1000
    assert due <= seconds < due + LATE
    gate.open()


def test_who_is_in_time_notices_nothing(server, install):
    answer, _ = ask_within(server, install(), NEVER, id=1)
    assert answer.json() == {"id": 1, "batch": 1}


@pytest.mark.parametrize(("header", "value"), [("X-Timeout-Ms", "-5"), ("X-Priority", "urgent")])
def test_a_wrong_header_reaches_nobody(server, install, record, header, value):
    name = install()
    order = {"id": 1, "record": str(record)}
    answer = server.predict(name, json=order, headers={header: value})
    assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
    assert answer.json()["message"].startswith(f"{header}='{value}': it is ")
    assert server.ask(name).status_code == 200
    assert record.read_text() == ""


SLOW = (
    "import time\n"
    "def handle(data, context):\n"
    "    time.sleep(0.1)\n"
    "    return ['done'] * len(data or [])\n"
)


def test_who_cannot_be_in_time_is_refused_at_once(server, install, wait_for):
    name = install(handler=SLOW, batch_policy="adaptive", batch_size=4)
    for _ in range(10):
        assert server.ask(name).text == "done"
    # One a second is let in, whatever is foreseen: how else should a change be noticed?
    answer, seconds = wait_for(lambda: refused(ask_within(server, name, 50)))
    assert seconds < 0.1  # the model itself takes longer
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["type"] == "ServiceUnavailableException"
    assert "cannot be answered in time" in answer.json()["message"]
    assert server.ask(name).status_code == 200
    counted = server.metrics("marserve_rejected_requests_total")
    assert any(name in series and '"overloaded"' in series for series in counted)


def refused(answered):
    assert answered[0].status_code in (503, 504)
    return answered if answered[0].status_code == 503 else None
