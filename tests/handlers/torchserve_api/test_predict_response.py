"""create_predict_response in a worker: handlers that send pieces of an answer with it."""

import pytest
from ts.handler_utils.utils import create_predict_response
from ts.handler_utils.utils import send_intermediate_predict_response as send_piece

from marserve.backend.context import Context
from marserve.backend.protocol import Input, Part, Predict
from marserve.backend.service import Service
from marserve.handlers.torchserve_api.mock_context import MockContext
from marserve.handlers.torchserve_api.predict_response import send_intermediate_predict_response


@pytest.fixture
def run():
    """The pieces that a service sends of one request, and its reply."""

    def run(entry_point):
        pieces = []
        service = Service(entry_point, Context("m", "/m", None, 1, None, "1"))
        reply = service.predict(
            Predict([Input("a", {}, [Part("body", "", bytearray(b"x"))])]), pieces.append
        )
        return pieces, reply

    return run


def test_a_piece_sent_over_cl_socket_reaches_the_client(run):
    def handle(data, context):
        message = create_predict_response(["one"], context.request_ids, "", 200, context, True)
        context.cl_socket.sendall(message)
        return ["two"]

    [piece], reply = run(handle)
    assert bytes(piece.predictions[0].body) == b"one"
    assert piece.predictions[0].headers == {"ts_stream_next": "true"}
    assert bytes(reply.predictions[0].body) == b"two"
    assert reply.predictions[0].headers == {"ts_stream_next": "false"}


def test_other_ranks_send_nothing(run, monkeypatch):
    def handle(data, context):
        monkeypatch.setenv("LOCAL_RANK", "1")
        message = create_predict_response(["one"], context.request_ids, "", 200, context, True)
        context.cl_socket.sendall(message)
        return ["two"]

    pieces, _ = run(handle)
    assert pieces == []


def test_nothing_else_goes_over_cl_socket(run, caplog):
    def handle(data, context):
        context.cl_socket.sendall(b"bytes")

    _, reply = run(handle)
    assert reply.code == 503
    assert "only sends results of create_predict_response" in caplog.text


def test_an_assigned_socket_is_kept():
    context = Context("m", "/m", None, 1, None, "1")
    assert context.cl_socket is None
    context.cl_socket = "mine"
    assert context.cl_socket == "mine"


class _Batch:
    """A context of a test: one answer, and the socket of a worker."""

    stopping_criteria = None

    def __init__(self) -> None:
        self.cl_socket, self.sent, self.headers = self, [], {}

    def sendall(self, message) -> None:
        self.sent.append(bytes(message))

    def get_response_status(self, _index):
        return 200, ""

    def get_response_headers(self, _index):
        return self.headers

    def set_response_header(self, _index, name, value) -> None:
        self.headers[name] = value

    def get_response_content_type(self, _index) -> None:
        return None


def test_a_piece_is_sent_over_the_socket_of_another_context():
    context = _Batch()
    send_piece(["one"], {0: "id-0"}, "Result", 200, context)
    assert context.sent == [
        bytes(create_predict_response(["one"], {0: "id-0"}, "Result", 200, context, True))
    ]
    assert context.headers == {"ts_stream_next": "true"}


def test_a_piece_is_sent_over_the_socket_that_a_test_has_set():
    context, batch = MockContext(), _Batch()
    context.cl_socket = batch
    send_piece(["one"], context.request_ids, "Result", 200, context)
    assert b"one" in batch.sent[0]


def test_the_deprecated_function_sends_and_warns(make_context, begin_batch):
    context, sent = begin_batch(make_context(), {}), []
    context.on_intermediate = lambda *what: sent.append(what)
    with pytest.warns(PendingDeprecationWarning, match=r"ts\.handler_utils\.utils"):
        send_intermediate_predict_response(["a"], context.request_ids, "Result", 200, context)
    assert sent == [(["a"], {0: "id-0"}, "Result", 200)]


def test_a_context_is_required():
    with (
        pytest.warns(PendingDeprecationWarning),
        pytest.raises(ValueError, match="needs the context"),
    ):
        send_intermediate_predict_response(["a"], {0: "id-0"}, "Result", 200)
