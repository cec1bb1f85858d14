"""gRPC clients that ask for much with little, or whose failure is hard to tell."""

import contextlib
import json
import socket
import struct
import threading
import time

import grpc
import h2.connection
import h2.events
import psutil
import pytest
from grpc_client import connected, failure, request
from servers import wait_for

from marserve.frontend.grpc.messages import load_proto
from marserve.frontend.grpc.tensor_messages import _MAX_MEMBERS

pytestmark = pytest.mark.integration

OPEN_INFERENCE = load_proto("open_inference.proto").messages
RAISES = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return None
    raise PredictionException(bytes(data[0]["data"]).decode("unicode_escape"), 503)
"""

THIRTY_PIECES = """
class Handler:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        for _ in range(30):
            context.send_intermediate(["x" * 1_000_000])
            await context.drain()
        return ["end"]
"""


@pytest.fixture
def client(server):
    with connected(server) as opened:
        yield opened


@pytest.fixture(scope="module")
def raises(server):
    server.install(RAISES, "raises")
    return "raises"


def infer(client, data, **options):
    call = client.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    return call(data, timeout=20, **options)


def test_a_long_failure_keeps_its_code(client, raises):
    """The client's own library answered RESOURCE_EXHAUSTED, for the text was too much metadata."""
    for text in (b"x" * 100_000, b"\\u20ac" * 10_000):
        code, details = failure(lambda text=text: client.predict(raises, text))
        assert code == "UNAVAILABLE"
        assert details.endswith("...\norg.pytorch.serve.http.InternalServerException")
    assert failure(lambda: client.predict("y" * 1_000_000))[0] == "INTERNAL"
    assert failure(lambda: client.call("health", "Check", service="y" * 60_000))[0] == "NOT_FOUND"


def test_a_failure_that_utf_8_cannot_encode_is_told(client, raises):
    """The call was never answered."""
    code, details = failure(lambda: client.predict(raises, b"half \\udc80 a letter"))
    assert code == "UNAVAILABLE"
    assert details.startswith("half \\udc80 a letter\n")


def test_a_request_has_no_more_inputs_than_a_form_has_fields(client, raises):
    inputs = {str(number): b"" for number in range(1001)}
    assert failure(lambda: client.predict(raises, input=inputs)) == (
        "INVALID_ARGUMENT",
        "The request has more than 1000 inputs.\norg.pytorch.serve.http.BadRequestException",
    )


@pytest.mark.parametrize("field", ["inputs", "outputs", "parameters", "shape"])
def test_a_request_of_millions_of_empty_tensors_is_refused_at_once(server, client, field):
    """One of 6 MB kept everybody waiting for seconds, and took gigabytes."""
    server.install("def handle(data, context):\n    return data and ['x'] * len(data)", field)
    count = _MAX_MEMBERS + 1
    message = OPEN_INFERENCE.ModelInferRequest(model_name=field)
    message.inputs.add(name="x", datatype="INT8")
    if field == "parameters":
        for number in range(count):
            message.parameters[str(number)].bool_param = True
    elif field == "shape":
        message.inputs[0].shape.extend([1] * count)
    data = message.SerializeToString()
    if field in ("inputs", "outputs"):
        data += {"inputs": b"\x2a\x00", "outputs": b"\x32\x00"}[field] * 3_000_000
    began = time.monotonic()
    code, text = failure(lambda: infer(client, data))
    assert (code, text) == (
        "INVALID_ARGUMENT",
        f"The request has more than {_MAX_MEMBERS} tensors, dimensions and parameters.",
    )
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "answer",
    [
        {"outputs": [{"name": "\udc80", "data": [1]}]},
        {"outputs": [{"name": "x", "data": [1]}], "parameters": [1]},
        {"outputs": [{"name": "x", "data": [1]}], "id": "\udc80"},
        {"outputs": [{"name": "x", "data": [1], "parameters": {"\udc80": 1}}]},
    ],
)
def test_an_answer_that_messages_have_no_room_for_is_the_models_fault(server, client, answer):
    """It was told as a defect of the server, with a traceback in its log."""
    server.install(f"def handle(data, context):\n    return data and [{answer!r}]", "answers")
    message = OPEN_INFERENCE.ModelInferRequest(model_name="answers")
    message.inputs.add(name="x", datatype="INT8", shape=[0])
    assert failure(lambda: infer(client, message.SerializeToString())) == (
        "INTERNAL",
        "The model's answer is not one of the Open Inference Protocol.",
    )
    assert "Cannot answer" not in server.console_text()
    server.management("DELETE", "/models/answers")


# -- clients that do not read ----------------------------------------------------------------------

PREDICTIONS = "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"


def frame(kind, flags, stream, payload):
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def ask_and_do_not_read(server, model, count, **orders):
    """Ask for predictions on a connection that has no room for an answer; returns it."""
    head = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in {
            ":method": "POST",
            ":scheme": "http",
            ":path": PREDICTIONS,
            ":authority": "x",
            "te": "trailers",
            "content-type": "application/grpc",
        }.items()
    )
    message = request(model, json.dumps(orders).encode()).SerializeToString()
    body = b"\0" + struct.pack(">I", len(message)) + message
    # The settings allow no bytes of an answer until the client says otherwise.
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"\0\x04\0\0\0\0")
    for stream in range(1, 2 * count, 2):
        sent += frame(1, 4, stream, head) + frame(0, 1, stream, body)
    connection = socket.create_connection(("127.0.0.1", server.grpc_ports["inference"]))
    connection.sendall(sent)
    return connection


def answer_or_code(client):
    """The answer to a small request, or how it failed."""
    try:
        return client.predict("m", b'{"id": "x"}')
    except grpc.RpcError as error:
        return error.code()


def test_answers_that_nobody_reads_keep_further_requests_out(start_server, handlers):
    """They filled the memory, 6 MB each."""
    limits = {"max_request_size": "100000", "max_bytes_in_flight": "3000000"}
    with start_server(**limits) as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")

        with ask_and_do_not_read(server, "m", 4, size=1_000_000):
            wait_for(lambda: answer_or_code(client) == grpc.StatusCode.UNAVAILABLE)
            assert client.call("health", "Check").status == 1
        wait_for(lambda: answer_or_code(client) == b"x")


def test_clients_that_leave_while_they_are_answered_leave_no_tracebacks(server, client, handlers):
    """There were two for each, ours and grpc's."""
    server.install(handlers / "parts.py", "left")
    done = "InferenceAPIsService/Predictions"
    before = server.log("access_log.log").count(done)
    with ask_and_do_not_read(server, "left", 5, size=1_000_000):
        wait_for(lambda: server.log("access_log.log").count(done) == before + 5)
    answers = client.stream("left", b'{"pieces": 9, "size": 2000000}')
    next(answers)
    answers.cancel()
    server.wait_taken("left", 0)
    assert client.predict("left", b'{"id": "alive"}') == b"alive"
    assert "ExecuteBatchError" not in server.console_text()


def test_calls_without_a_key_take_no_places_of_others(start_server):
    """Watchers of health, who need no key, kept all others out; and these kept probes out."""
    with start_server(grpc_max_calls="2") as server, connected(server) as client:
        watches = [client.call("health", "Watch", timeout=20) for _ in range(2)]
        assert [next(each).status for each in watches] == [1, 1]
        assert failure(lambda: client.call("health", "Check"))[0] == "RESOURCE_EXHAUSTED"
        assert client.call("inference", "Ping")


def reason_of(answers):
    """Why answers broke off; empty if they did not."""
    try:
        list(answers)
    except grpc.RpcError as error:
        return error.details().partition("\n")[0]
    return ""


def test_answers_in_pieces_that_nobody_reads_do_not_fill_the_memory(start_server, handlers):
    """Each could fill max_stream_backlog, whatever was in flight."""
    limits = {"max_bytes_in_flight": "20000000", "max_client_bytes_in_flight": "20000000"}
    with start_server(**limits) as server, connected(server) as client:
        server.install(handlers / "parts.py", "m")
        body = b'{"pieces": 10, "size": 2000000}'
        answers = [client.stream("m", body) for _ in range(4)]
        for each in answers:
            next(each)
        wait_for(lambda: answer_or_code(client) == b"x")  # behind them
        reasons = [reason_of(each) for each in answers]  # in whatever order they were taken
        assert "the client is too slow, and too much is in flight" in reasons
        for each in answers:
            each.cancel()
        wait_for(lambda: answer_or_code(client) == b"x")


def test_an_inference_in_pieces_may_be_longer_than_what_may_be_in_flight(start_server):
    """Pieces that were sent counted until the end of the answer."""
    limits = {"max_bytes_in_flight": "20000000", "max_client_bytes_in_flight": "20000000"}
    with start_server(**limits) as server, connected(server) as client:
        server.install(THIRTY_PIECES, "m", "asyncCommunication: true\n")
        asked = OPEN_INFERENCE.ModelInferRequest(model_name="m")
        asked.inputs.add(name="x", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
        stream = client.method("open_inference", "ModelStreamInfer")
        answers = list(stream(iter([asked]), timeout=60))
        assert [each.error_message for each in answers if each.error_message] == []
        assert sum(each.ByteSize() for each in answers) > 30_000_000


def test_a_client_that_answers_no_ping_is_disconnected(start_server):
    """grpc waited a minute, whatever grpc_keepalive_timeout was."""
    with (
        start_server(grpc_keepalive_time="1", grpc_keepalive_timeout="1") as server,
        socket.create_connection(("127.0.0.1", server.grpc_ports["inference"]), 20) as silent,
    ):
        silent.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        while silent.recv(1 << 16):
            pass


# -- clients that do not finish a message ----------------------------------------------------------

CHECK = "/grpc.health.v1.Health/Check"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MEBIBYTE = 1 << 20


class HalfSender:
    """A connection with calls that announce a message and send a part of it.

    Attributes:
        codes: The statuses with which the server has ended calls.
    """

    def __init__(self, server, path, calls, announced, first=b""):
        self.codes = []
        self._socket = socket.create_connection(("127.0.0.1", server.grpc_ports["inference"]))
        self._http = h2.connection.H2Connection()
        self._http.initiate_connection()
        self._left = {}
        for _ in range(calls):
            stream = self._http.get_next_available_stream_id()
            names = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
            names |= {"te": "trailers", "content-type": "application/grpc"}
            self._http.send_headers(stream, list(names.items()))
            whole = b"\0" + struct.pack(">I", len(first)) + first if first else b""
            self._http.send_data(stream, whole + b"\0" + struct.pack(">I", announced))
            self._left[stream] = announced - 1
        self.exchange()

    def send(self, seconds):
        """Send what the server's windows allow, for so long, or until nothing more is taken."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self._left:
            for stream in tuple(self._left):
                self._send(stream)
            self.exchange()

    def exchange(self, timeout=0.1):
        """Write what is to be written, and read what has come within a moment."""
        self._socket.settimeout(10)
        self._socket.sendall(self._http.data_to_send())
        self._socket.settimeout(timeout)
        with contextlib.suppress(TimeoutError):
            for event in self._http.receive_data(self._socket.recv(1 << 16)):
                self._note(event)

    def close(self):
        self._socket.close()

    def _send(self, stream):
        window = self._http.local_flow_control_window(stream)
        count = min(window, self._left[stream], self._http.max_outbound_frame_size)
        if count > 0:
            self._http.send_data(stream, b"x" * count)
            self._left[stream] -= count

    def _note(self, event):
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            headers = dict(event.headers)
            if b"grpc-status" in headers:
                self.codes.append(int(headers[b"grpc-status"]))
                self._left.pop(event.stream_id, None)
        elif isinstance(event, h2.events.StreamReset):
            self._left.pop(event.stream_id, None)


@pytest.fixture(scope="module")
def small(start_server):
    """A server whose requests may take 16 MB, two of them as long as allowed."""
    limits = {"max_request_size": str(8 * MEBIBYTE), "max_bytes_in_flight": str(16 * MEBIBYTE)}
    with start_server(**limits) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "first"),
    [(CHECK, b""), (PREDICTIONS, b""), (STREAM, b"\n\1x"), (REFLECTION, b"\x3a\1*")],
)
def test_messages_that_are_never_complete_do_not_fill_the_memory(small, path, first):
    """250 of them took 1.6 GB, without a key, and kept it."""
    memory = psutil.Process(small.process.pid).memory_info
    before = memory().rss
    with (
        connected(small) as client,
        contextlib.closing(HalfSender(small, path, 60, 8 * MEBIBYTE, first)) as sender,
    ):
        for _ in range(5):
            sender.send(seconds=1)
            assert client.call("health", "Check").status == 1
    # A stream that has sent one request may wait for the next; there may be 16.
    assert memory().rss - before < (170 if path == STREAM else 60) * MEBIBYTE


def test_a_message_without_a_key_has_to_come_in_time_and_be_short(small):
    with contextlib.closing(HalfSender(small, CHECK, 1, 100)) as sender:
        wait_for(lambda: sender.exchange() or sender.codes == [4])
    with connected(small) as client:
        code, text = failure(lambda: client.call("health", "Check", service="y" * (1 << 16)))
        assert (code, text.partition("\n")[0]) == (
            "RESOURCE_EXHAUSTED",
            "The message has more than 65536 bytes.",
        )


def test_streams_that_wait_for_a_request_are_no_more_than_fit_into_memory(small, handlers):
    small.install(handlers / "parts.py", "waits")
    ask = request("waits", b'{"id": "x"}')
    ask.sequence_id = "s"
    with connected(small) as client, contextlib.ExitStack() as streams:

        def open_stream():
            answers = client.method("inference", "StreamPredictions2")(
                requests_until(streams.enter_context(open_gate()), ask), timeout=20
            )
            streams.callback(answers.cancel)
            return next(answers).prediction

        assert [open_stream() for _ in range(16)] == [b"x"] * 16
        assert failure(open_stream) == (
            "RESOURCE_EXHAUSTED",
            "16 calls are open, as many as max_bytes_in_flight allows.",
        )
        assert client.predict("waits", b'{"id": "y"}') == b"y"


@contextlib.contextmanager
def open_gate():
    gate = threading.Event()
    try:
        yield gate
    finally:
        gate.set()


def requests_until(gate, first):
    """One request, and the end of the stream when the gate is open."""
    yield first
    gate.wait(20)
