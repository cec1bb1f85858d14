"""Handlers that wait for the readers of their answers in pieces (`Context.drain`)."""

import json
import os
import signal
import socket

import pytest
from grpc_client import connected, failure
from servers import make_workflow

pytestmark = pytest.mark.integration

SIZE = 200_000
CONFIG = "asyncCommunication: true\nhandler: {cancellable: %s}\n"
# More than the window and what the sockets of one client hold.
MOST = 100 * SIZE
MANY = 1000


@pytest.fixture(scope="module")
def models(server, handlers):
    for name, is_cancellable in (("drainer", "true"), ("stubborn", "false")):
        server.install(handlers / "drainer.py", name, CONFIG % is_cancellable)
    server.install(handlers / "caller.py", "caller", "asyncCommunication: true\n")


def content(pieces):
    return b"".join(b"%08d" % number * (SIZE // 8) for number in range(pieces)) + b"end"


def state(server, name, model="drainer"):
    return server.ask(model, read=True).json().get(name, {"sent": 0, "end": ""})


def begin(server, model="drainer", **order):
    """A client that reads nothing, and whose kernel buffers little."""
    body = json.dumps(order).encode()
    head = f"POST /predictions/{model} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(20)
    client.connect(("127.0.0.1", server.ports["inference"]))
    client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return client


def wait_until_still(wait_for, count):
    """Wait until a number is more than 0 and the same several times in a row; return it."""
    counts = [0]

    def is_still():
        counts.append(count())
        return counts[-1] > 0 and set(counts[-5:]) == {counts[-1]}

    wait_for(is_still)
    return counts[-1]


def over_http(server, order):
    return server.predict("drainer", json=order).content


def over_grpc(server, order):
    with connected(server) as client:
        return client.predict("drainer", json.dumps(order).encode())


def over_grpc_in_pieces(server, order):
    with connected(server) as client:
        pieces = client.stream("drainer", json.dumps(order).encode())
        return b"".join(piece.prediction for piece in pieces)


def by_a_call(server, order):
    text = server.ask("caller", calls=[{"model": "drainer", "data": order}]).json()[0]
    return text.encode()


def by_a_workflow(server, order):
    source = "import json\ndef start(data, context):\n    return data and [json.dumps(ORDER)]\n"
    text = "models: {node: {url: archive-of-drainer.mar}}\ndag: {start: [node]}\n"
    make_workflow(server.store, "readers", text, source.replace("ORDER", repr(order)))
    made = server.management("POST", "/workflows?url=readers.war")
    assert made.status_code == 200, made.text
    answer = server.inference("POST", "/wfpredict/readers", data=b"x").content
    server.management("DELETE", "/workflows/readers")
    return answer


@pytest.mark.parametrize(
    "ask", [over_http, over_grpc, over_grpc_in_pieces, by_a_call, by_a_workflow]
)
def test_every_reader_gets_the_whole_of_a_long_answer(server, models, ask):
    assert ask(server, {"name": ask.__name__, "pieces": 30}) == content(30)


def test_a_handler_waits_for_a_client_and_continues_with_it(server, models, wait_for):
    with begin(server, name="slow", pieces=MANY // 5) as client:
        sent = wait_until_still(wait_for, lambda: state(server, "slow")["sent"])
        assert sent * SIZE < MOST
        received = bytearray()
        while not received.endswith(b"\r\n0\r\n\r\n"):
            data = client.recv(1 << 20)
            assert data
            received += data
    assert len(received) > MANY // 5 * SIZE
    assert state(server, "slow") == {"sent": MANY // 5, "end": "finished"}


@pytest.mark.parametrize(
    ("model", "end"), [("drainer", "cancelled"), ("stubborn", "finished")], ids=str
)
def test_no_handler_waits_for_a_client_that_has_left(server, models, wait_for, model, end):
    with begin(server, model, name="left", pieces=MANY):
        wait_until_still(wait_for, lambda: state(server, "left", model)["sent"])
    wait_for(lambda: state(server, "left", model)["end"] == end)
    server.wait_taken(model, 0)


def test_the_answer_is_broken_off_when_the_worker_dies_and_the_next_one_serves(
    server, models, wait_for
):
    with begin(server, name="killed", pieces=MANY) as client:
        wait_until_still(wait_for, lambda: state(server, "killed")["sent"])
        os.kill(server.worker("drainer")["pid"], signal.SIGKILL)
        received = b""
        while data := _received(client):
            received = (received + data)[-10:]
        assert not received.endswith(b"\r\n0\r\n\r\n")
    assert over_http(server, {"name": "next", "pieces": 2}) == content(2)
    server.wait_taken("drainer", 0)


def _received(client):
    try:
        return client.recv(1 << 20)
    except ConnectionError:
        return b""


def test_a_stream_is_not_broken_off_since_its_handler_waits(start_server, handlers, wait_for):
    with start_server(max_stream_backlog="500000") as server:
        server.install(handlers / "drainer.py", "drainer", CONFIG % "true")
        with begin(server, name="slow", pieces=100) as client:
            wait_until_still(wait_for, lambda: state(server, "slow")["sent"])
            received = b""
            while not received.endswith(b"\r\n0\r\n\r\n"):
                data = client.recv(1 << 20)
                assert data
                received = (received + data)[-10:]
        assert "broken off" not in server.console_text()


@pytest.fixture(params=["1000000", "0"])
def impatient(request, start_server, handlers):
    with start_server(response_write_timeout="1", response_write_rate=request.param) as server:
        server.install(handlers / "drainer.py", "drainer", CONFIG % "true")
        yield server


def given_up(server):
    counted = server.metrics("marserve_limits_reached_total")
    return sum(count for labels, count in counted.items() if "response_write_timeout" in labels)


def test_a_client_that_reads_nothing_is_given_up_and_its_handler_with_it(impatient, wait_for):
    with begin(impatient, name="lazy", pieces=MANY):
        wait_for(lambda: state(impatient, "lazy")["end"] == "cancelled")
        assert given_up(impatient) == 1
    impatient.wait_taken("drainer", 0)


def test_a_grpc_client_that_reads_nothing_is_given_up_and_its_handler_with_it(impatient, wait_for):
    with connected(impatient) as client:
        order = json.dumps({"name": "lazy", "pieces": MANY}).encode()
        call = client.stream("drainer", order, timeout=None)
        next(call)
        wait_for(lambda: state(impatient, "lazy")["end"] == "cancelled")
        assert given_up(impatient) == 1
        assert failure(lambda: call)[0] == "DEADLINE_EXCEEDED"
    impatient.wait_taken("drainer", 0)
