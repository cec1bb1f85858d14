"""gRPC where something goes wrong: workers, clients, messages, connections."""

import contextlib
import json
import os
import signal
import socket
import struct
import threading

import grpc
import pytest
from grpc_client import connected, failure, request
from servers import read

pytestmark = pytest.mark.integration

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


@pytest.fixture(scope="module")
def model(server, handlers):
    server.install(handlers / "parts.py", "m")
    return "m"


@pytest.fixture
def client(server):
    with connected(server) as opened:
        yield opened


def orders(**given):
    return json.dumps(given).encode()


def unary(client, model, body, **options):
    """A call that goes on in the background."""
    method = client.method("inference", "Predictions")
    return method.future(request(model, body), **options)


def chat(client, model, body, **options):
    """The same in a stream of requests; it stays open."""
    sent = threading.Event()

    def requests():
        yield request(model, body, sequence_id="s")
        sent.wait(20)

    answers = client.method("inference", "StreamPredictions2")(requests(), **options)
    answers.add_done_callback(lambda _: sent.set())
    return answers


def assert_nothing_left(server, model):
    """No request is open, no call, and the model serves."""
    server.wait_taken(model, 0)
    with connected(server) as fresh:
        assert fresh.predict(model, orders(id="alive"), timeout=20) == b"alive"
    server.wait_taken(model, 0)


STARTS = [
    pytest.param(unary, id="unary"),
    pytest.param(lambda c, m, b, **o: c.stream(m, b, **o), id="stream"),
    pytest.param(chat, id="requests"),
]


@pytest.mark.parametrize("start", STARTS)
def test_a_cancelled_call_leaves_the_queue(server, client, model, start, make_gate, tmp_path):
    gate, record = make_gate(), tmp_path / "seen"
    ahead = unary(client, model, orders(id="ahead", gate=gate.path))
    gate.wait_entered()
    queued = start(client, model, orders(id="cancelled", record=str(record)))
    server.wait_queued(model, 1)
    queued.cancel()
    server.wait_queued(model, 0)
    gate.open()
    assert ahead.result().prediction == b"ahead"
    assert_nothing_left(server, model)
    assert not record.exists()
    server.wait_logged("access_log.log", 'HTTP/2.0" 1 ')


@pytest.mark.parametrize("start", STARTS)
def test_a_call_whose_deadline_has_passed_leaves_the_queue(
    server, client, model, start, make_gate, tmp_path
):
    gate, record = make_gate(), tmp_path / "seen"
    ahead = unary(client, model, orders(id="ahead", gate=gate.path))
    gate.wait_entered()
    late = start(client, model, orders(id="late", record=str(record)), timeout=0.3)
    assert failure(lambda: late.result() if start is unary else list(late))[0] == (
        "DEADLINE_EXCEEDED"
    )
    server.wait_queued(model, 0)
    gate.open()
    assert ahead.result().prediction == b"ahead"
    assert_nothing_left(server, model)
    assert not record.exists()


def test_a_timeout_in_the_metadata_counts_too(server, client, model, make_gate):
    gate = make_gate()
    ahead = unary(client, model, orders(id="ahead", gate=gate.path))
    gate.wait_entered()
    code, text = failure(lambda: client.predict(model, metadata=[("x-timeout-ms", "100")]))
    assert code == "DEADLINE_EXCEEDED"
    assert text.startswith("No prediction within X-Timeout-Ms=100.")
    gate.open()
    assert ahead.result().prediction == b"ahead"


@pytest.mark.parametrize("start", STARTS[1:])
def test_a_stream_that_its_client_leaves_is_closed(server, client, model, start, make_gate):
    gate = make_gate()
    answers = start(client, model, orders(pieces=3, gate=gate.path))
    assert next(answers).prediction == b"0;"
    answers.cancel()
    gate.open_for_all()
    assert_nothing_left(server, model)


@pytest.mark.parametrize("start", STARTS)
def test_a_request_whose_worker_is_killed_is_run_once_more_and_answered_once(
    server, client, model, start, make_gate, tmp_path
):
    gate, record = make_gate(), tmp_path / "seen"
    call = start(client, model, orders(id="held", record=str(record), gate=gate.path))
    gate.wait_entered()
    os.kill(server.worker(model)["pid"], signal.SIGKILL)
    gate.open_for_all()
    assert (call.result() if start is unary else next(call)).prediction == b"held"
    assert record.read_text() == "held\n" * 2
    if start is chat:
        call.cancel()
    elif start is not unary:
        assert list(call) == []
    assert_nothing_left(server, model)


@pytest.mark.parametrize("start", STARTS)
def test_a_request_that_kills_its_worker_again_is_told_so(server, client, model, start):
    call = start(client, model, orders(do="exit"))
    if start is chat:
        status = next(call).status
        assert (status.code, status.message[:12]) == (13, "Worker died.")
        call.cancel()
    else:
        code, text = failure(lambda: call.result() if start is unary else list(call))
        assert (code, text[:12]) == ("INTERNAL", "Worker died.")
    server.wait_workers(model, "READY")
    assert_nothing_left(server, model)


@pytest.mark.parametrize("start", STARTS[1:])
def test_an_answer_that_breaks_off_is_told(server, client, model, start):
    answers = start(client, model, orders(pieces=2, do="exit"))
    assert next(answers).prediction == b"0;"
    if start is chat:
        assert next(answers).status.code == grpc.StatusCode.INTERNAL.value[0]
        answers.cancel()
    else:
        assert failure(lambda: next(answers))[0] == "INTERNAL"
    server.wait_workers(model, "READY")
    assert_nothing_left(server, model)


# -- bad input -------------------------------------------------------------------------------------


def test_pieces_that_are_put_together_do_not_fill_the_memory(server, client):
    """A call for one answer joined whatever a model that answers in pieces had to say."""
    source = """
def handle(data, context):
    for _ in data or ():
        for _ in range(3):
            context.send_intermediate([bytes(3_000_000)])
    return data and ["end"]
"""
    server.install(source, "talkative")
    code, text = failure(lambda: client.predict("talkative", b"x"))
    assert code == "INTERNAL"
    assert "The pieces of an answer are longer than 6553500 bytes." in text
    server.wait_taken("talkative", 0)


@pytest.mark.parametrize(
    "data",
    [b"\x0a", b"\x0a\x05ab", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x07", b"\x0a\x01\xff"],
    ids=["cut off", "shorter than said", "garbage", "2 GB", "not UTF-8"],
)
def test_what_is_no_message_is_refused(server, client, model, data):
    call = client.channel.unary_unary(PREDICTIONS)
    lines = server.log("ts_log.log").count("\n")
    assert failure(lambda: call(data, timeout=10))[0] == "INVALID_ARGUMENT"
    assert server.log("ts_log.log").count("\n") == lines
    assert client.predict(model, orders(id="alive")) == b"alive"


def test_a_broken_message_ends_a_stream_of_requests(client, model):
    call = client.channel.stream_stream(PREDICTIONS[:-11] + "StreamPredictions2")
    assert failure(lambda: call(iter([b"\xff"]), timeout=10))[0] == "INVALID_ARGUMENT"


def test_an_unknown_method_is_said_to_be_that(client):
    call = client.channel.unary_unary("/org.pytorch.serve.Unknown/Call")
    assert failure(lambda: call(b"", timeout=10))[0] == "UNIMPLEMENTED"


def test_a_message_that_is_too_long_is_refused(client, model):
    assert failure(lambda: client.predict(model, bytes(7_000_000)))[0] == "RESOURCE_EXHAUSTED"
    assert client.predict(model, orders(id="alive")) == b"alive"


def test_a_message_that_unpacks_to_much_is_refused(server, model):
    with connected(server, default_compression_algorithm=2) as packed:
        assert failure(lambda: packed.predict(model, bytes(100_000_000)))[0] == (
            "RESOURCE_EXHAUSTED"
        )


def test_much_metadata_is_refused(client, model):
    metadata = [(f"x-{n}", "x" * 1000) for n in range(100)]
    assert failure(lambda: client.predict(model, metadata=metadata))[0] == "RESOURCE_EXHAUSTED"
    assert client.predict(model, orders(id="alive")) == b"alive"


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01" + bytes(200),
        PREFACE + b"\xff" * 100,
        PREFACE + struct.pack(">I", 0x7FFFFFFF)[1:] + b"\x00\x00\x00\x00\x00\x01",
        PREFACE
        + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        + b"\x00\x00\x05\x01\x04\x00\x00\x00\x01zzzzz",
    ],
    ids=["HTTP/1.1", "TLS", "garbage", "a large frame", "bad headers"],
)
def test_who_speaks_no_grpc_harms_nobody(server, client, model, sent):
    with socket.create_connection(("127.0.0.1", server.grpc_ports["inference"])) as connection:
        connection.settimeout(10)
        connection.sendall(sent)
        with contextlib.suppress(TimeoutError):
            read(connection)
    assert client.predict(model, orders(id="alive")) == b"alive"
    assert "Traceback" not in server.console_text()


def test_many_broken_messages_do_not_fill_the_log(server, client, model):
    call = client.channel.unary_unary(PREDICTIONS)
    before = len(server.console_text())
    for _ in range(50):
        failure(lambda: call(b"\xff", timeout=10))
    assert len(server.console_text()) - before < 500
