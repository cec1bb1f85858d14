"""create_predict_response in a worker: handlers that send pieces of an answer with it."""

import pytest
from ts.handler_utils.utils import create_predict_response

from marserve.backend.context import Context
from marserve.backend.protocol import Input, Part, Piece, Predict, Reply
from marserve.backend.service import Service
from marserve.handlers.torchserve_api.predict_response import send_intermediate_predict_response


@pytest.fixture
def run():
    """The pieces that a service sends of one request, and its reply."""

    def run(entry_point) -> tuple[list[Piece], Reply]:
        pieces: list[Piece] = []
        service = Service(entry_point, Context("m", "/m", None, 1, None, "1"))
        reply = service.predict(
            Predict([Input("a", {}, [Part("body", "", bytearray(b"x"))])]), pieces.append
        )
        return pieces, reply

    return run


def test_a_piece_sent_over_cl_socket_reaches_the_client(run) -> None:
    def handle(data, context):
        message = create_predict_response(["one"], context.request_ids, "", 200, context, True)
        context.cl_socket.sendall(message)
        return ["two"]

    [piece], reply = run(handle)
    assert bytes(piece.predictions[0].body) == b"one"
    assert piece.predictions[0].headers == {"ts_stream_next": "true"}
    assert bytes(reply.predictions[0].body) == b"two"
    assert reply.predictions[0].headers == {"ts_stream_next": "false"}


def test_other_ranks_send_nothing(run, monkeypatch) -> None:
    def handle(data, context):
        monkeypatch.setenv("LOCAL_RANK", "1")
        message = create_predict_response(["one"], context.request_ids, "", 200, context, True)
        context.cl_socket.sendall(message)
        return ["two"]

    pieces, _ = run(handle)
    assert pieces == []


def test_nothing_else_goes_over_cl_socket(run, caplog) -> None:
    def handle(data, context):
        context.cl_socket.sendall(b"bytes")

    _, reply = run(handle)
    assert reply.code == 503
    assert "only sends results of create_predict_response" in caplog.text


def test_an_assigned_socket_is_kept() -> None:
    context = Context("m", "/m", None, 1, None, "1")
    assert context.cl_socket is None
    context.cl_socket = "mine"
    assert context.cl_socket == "mine"


def test_the_deprecated_function_sends_and_warns(make_context, begin_batch) -> None:
    context, sent = begin_batch(make_context(), {}), []
    context.on_intermediate = lambda *what: sent.append(what)
    with pytest.warns(PendingDeprecationWarning, match=r"ts\.handler_utils\.utils"):
        send_intermediate_predict_response(["a"], context.request_ids, "Result", 200, context)
    assert sent == [(["a"], {0: "id-0"}, "Result", 200)]


def test_a_context_is_required() -> None:
    with (
        pytest.warns(PendingDeprecationWarning),
        pytest.raises(ValueError, match="needs the context"),
    ):
        send_intermediate_predict_response(["a"], {0: "id-0"}, "Result", 200)
