"""Stages that overlap, without torch: a handler of the test's own, over a real socket pair."""

import gc
import logging
import select
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fed_decoder import Decoder

from marserve.backend.connection import FrontendConnection
from marserve.backend.context import Context
from marserve.backend.errors import PredictionException
from marserve.backend.framing import encode
from marserve.backend.metrics import MetricsStore
from marserve.backend.pipeline import _Pace, serve_in_stages
from marserve.backend.profiling.measurements import Measurements
from marserve.backend.protocol import (
    Input,
    Load,
    Message,
    NextBatch,
    Part,
    Piece,
    Predict,
    Reply,
)
from marserve.backend.service import Service

SECONDS = 5.0
STAGES = ("preprocess", "inference", "postprocess")


class Gates:
    """Points at which the handler waits: a pair of events for each stage and body."""

    def __init__(self) -> None:
        self.entered: dict[tuple[str, bytes], threading.Event] = {}
        self.opened: dict[tuple[str, bytes], threading.Event] = {}
        self.open_from_now = False

    def at(self, stage: str, body: bytes) -> None:
        """Stop a batch before it passes a stage."""
        self.entered[stage, body], self.opened[stage, body] = threading.Event(), threading.Event()

    def wait_entered(self, stage: str, body: bytes) -> None:
        assert self.entered[stage, body].wait(SECONDS), (stage, body)

    def open(self, stage: str, body: bytes) -> None:
        self.opened[stage, body].set()

    def pass_through(self, stage: str, body: bytes) -> None:
        if (stage, body) in self.entered:
            self.entered[stage, body].set()
            assert self.opened[stage, body].wait(SECONDS), (stage, body)


class Walk:
    """A batch in the stages of `Handler`."""

    def __init__(self, handler: "Handler", data: Any, context: Context) -> None:
        self.handler, self.data, self.context = handler, data, context
        self.left = list(STAGES)
        self.threads: list[str] = []

    def __iter__(self) -> "Walk":
        return self

    def __next__(self) -> float:
        stage, body = self.left.pop(0), bytes(self.data[0]["body"])
        self.handler.gates.pass_through(stage, body)
        self.threads.append(threading.current_thread().name)
        self.context.metrics.add_counter(stage, 1)
        if (action := self.handler.actions.get((stage, body))) is not None:
            action(self.context)
        return float(len(STAGES) - len(self.left))


class Handler:
    """The stages, and an entry point for batches that run alone."""

    def __init__(self) -> None:
        self.gates = Gates()
        self.actions: dict[tuple[str, bytes], Callable[[Context], Any]] = {}
        self.alone: list[bytes] = []
        self.under_way = 0
        self.walks: list[Walk] = []
        self.devices = 1

    def concurrent_inferences(self) -> int:
        return self.devices

    def begin_overlapping(self) -> None:
        pass

    def enter_stages(self, data: Any, context: Context) -> Walk | None:
        if context.get_request_header(0, "explain") == "True":
            return None
        self.under_way += 1
        self.walks.append(Walk(self, data, context))
        return self.walks[-1]

    def leave_stages(self, walk: Walk) -> list[Any]:
        self.under_way -= 1
        return [bytes(row["body"]) for row in walk.data]

    def handle(self, data: Any, context: Context) -> list[Any]:
        assert self.under_way == 0
        assert context.get_request_id(0) is not None
        self.alone.append(bytes(data[0]["body"]))
        self.gates.pass_through("alone", self.alone[-1])
        return ["alone"] * len(data)


class Peer:
    """The frontend's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._decoder = Decoder(1 << 20)
        self._inbox: list[Message] = []

    def send(self, *bodies: bytes, number: int, run_as: int = 0, **headers: str) -> None:
        inputs = [
            Input(f"{number}-{i}", headers, [Part("body", "", item)])
            for i, item in enumerate(bodies)
        ]
        self.send_message(Predict(inputs, number, run_as))

    def send_message(self, message: Message) -> None:
        self._sock.sendall(b"".join(encode(message)))

    def receive(self) -> Any:
        while not self._inbox:
            data = self._sock.recv(65536)
            assert data, "the worker left"
            self._inbox = self._decoder.feed(data)
        return self._inbox.pop(0)

    def answer(self) -> Reply:
        """Return the next reply that is not a piece."""
        while not isinstance(reply := self.receive(), Reply):
            pass
        return reply

    def asked_behind(self) -> int:
        request = self.receive()
        assert isinstance(request, NextBatch)
        return request.number

    @property
    def receives_nothing(self) -> bool:
        readable, _, _ = select.select([self._sock], [], [], 0)
        return not (readable or self._inbox)

    def leave(self) -> None:
        self._sock.shutdown(socket.SHUT_WR)


@pytest.fixture
def handler(request):
    handler = Handler()
    handler.devices = getattr(request, "param", 1)
    return handler


spread = pytest.mark.parametrize("handler", [2], indirect=True)
either = pytest.mark.parametrize("handler", [1, 2], indirect=True)


@pytest.fixture
def peer(handler):
    """The frontend's end of a worker that runs until the test leaves; ``end`` is its outcome."""
    near, far = socket.socketpair()
    near.settimeout(SECONDS)
    context = Context("m", "/m", None, 4, None, "1", metrics=MetricsStore())
    service = Service(handler.handle, context, stages=handler)
    connection = FrontendConnection(far)
    measurements = Measurements(Load("m", "/m", "h", 4, None, True, 1, "1"), service)

    with near, far, ThreadPoolExecutor(1, "main") as main:
        peer = Peer(near)
        peer.end = main.submit(serve_in_stages, connection, service, measurements.compare_once)
        yield peer
        for gate in handler.gates.opened.values():
            gate.set()
        if not peer.end.done():
            peer.leave()
        peer.end.exception(SECONDS)


def test_three_batches_are_in_three_stages_and_the_frontend_is_asked_for_more(handler, peer):
    for stage, body in zip(STAGES[::-1], (b"a", b"b", b"c"), strict=True):
        handler.gates.at(stage, body)
    for number, body in enumerate((b"a", b"b", b"c"), 1):
        peer.send(body, number=number)
        assert peer.asked_behind() == number
    for stage, body in zip(STAGES[::-1], (b"a", b"b", b"c"), strict=True):
        handler.gates.wait_entered(stage, body)
    for stage, body in zip(STAGES[::-1], (b"a", b"b", b"c"), strict=True):
        handler.gates.open(stage, body)
        reply = peer.answer()
        assert [bytes(item.body) for item in reply.predictions] == [body]
    assert [walk.threads for walk in handler.walks] == [["prepare_0", "main_0", "finish_0"]] * 3


@spread
def test_a_model_on_two_devices_takes_batches_while_others_are_in_it(handler, peer):
    """One more than it has devices, and they leave in order, however long each was in it."""
    bodies = (b"a", b"b", b"c", b"d", b"e")
    for body in bodies[:3]:
        handler.gates.at("inference", body)
    for number, body in enumerate(bodies, 1):
        peer.send(body, number=number)
    for body in bodies[:3]:
        handler.gates.wait_entered("inference", body)
    handler.gates.at("postprocess", b"a")
    for body in (b"c", b"b", b"a"):
        handler.gates.open("inference", body)
    handler.gates.wait_entered("postprocess", b"a")
    handler.gates.open("postprocess", b"a")
    assert [peer.answer().number for _ in bodies] == [1, 2, 3, 4, 5]


def test_a_batch_is_not_begun_while_the_one_before_waits_for_the_model(handler, peer):
    handler.gates.at("inference", b"a")
    handler.gates.at("preprocess", b"b")
    entered = []
    handler.actions["inference", b"a"] = lambda _: entered.append(len(handler.walks))
    for number, body in enumerate((b"a", b"b", b"c"), 1):
        peer.send(body, number=number)
    assert [peer.asked_behind(), peer.asked_behind()] == [1, 2]
    handler.gates.wait_entered("inference", b"a")
    handler.gates.wait_entered("preprocess", b"b")
    handler.gates.open("preprocess", b"b")
    handler.gates.open("inference", b"a")
    seen = [peer.receive() for _ in range(4)]
    assert sorted(reply.number for reply in seen) == [1, 2, 3, 3]
    assert entered == [2]


def test_the_worker_asks_late_when_the_model_takes_longest(handler, peer):
    """By then preparing took microseconds, and the model fifty milliseconds, twice."""
    for number, body in enumerate((b"a", b"b"), 1):
        handler.actions["inference", body] = lambda _: time.sleep(0.05)
        peer.send(body, number=number)
        assert peer.asked_behind() == number
        assert peer.answer().number == number
    handler.gates.at("preprocess", b"c")
    handler.gates.at("postprocess", b"c")
    peer.send(b"c", number=3)
    handler.gates.wait_entered("preprocess", b"c")
    assert peer.receives_nothing
    handler.gates.open("preprocess", b"c")
    assert peer.asked_behind() == 3  # at the latest as the model is free
    handler.gates.open("postprocess", b"c")
    assert peer.answer().number == 3


def test_the_reply_has_the_time_of_all_stages_and_the_metrics_of_its_requests(handler, peer):
    peer.send(b"a", b"b", number=1)
    reply = peer.answer()
    assert reply.handler_ms == 3000.0
    assert [(row[1], row[5]) for row in reply.metrics] == [
        (stage, ["1-0", "1-1"]) for stage in STAGES
    ]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("broken"), 503, "Prediction failed"),
        (PredictionException("no such thing", 404), 404, "no such thing : 404"),
        (MemoryError(), 507, "Out of resources"),
    ],
)
@either
def test_a_failure_concerns_its_batch_only(stage, error, code, message, handler, peer):
    def fail(_context):
        raise error

    handler.actions[stage, b"b"] = fail
    for number, body in enumerate((b"a", b"b", b"c"), 1):
        peer.send(body, number=number)
    replies = [peer.answer() for _ in range(3)]
    assert [reply.number for reply in replies] == [1, 2, 3]
    assert [reply.code for reply in replies] == [200, code, 200]
    assert replies[1].message in (message, message.partition(" : ")[0])


def test_a_failed_batch_does_not_lose_the_metrics_of_others(handler, peer):
    def fail(_context):
        raise ValueError

    handler.actions["postprocess", b"a"] = fail
    handler.gates.at("postprocess", b"a")
    handler.gates.at("inference", b"b")
    peer.send(b"a", number=1)
    peer.send(b"b", number=2)
    handler.gates.wait_entered("postprocess", b"a")
    handler.gates.wait_entered("inference", b"b")  # what preparing it took is reported
    handler.gates.open("postprocess", b"a")
    assert (failed := peer.answer()).code == 503
    assert [row[5] for row in failed.metrics] == [["1-0"]] * 3
    handler.gates.open("inference", b"b")
    assert [row[5] for row in peer.answer().metrics] == [["2-0"]] * 3


@pytest.mark.parametrize("stage", STAGES)
def test_a_failed_batch_is_released_before_the_next_one_is_in_the_model(
    stage, handler, peer, monkeypatch
):
    class Activations:
        """What the frames of a traceback keep."""

    # pytest keeps what is logged, and with it the traceback.
    monkeypatch.setattr(logging.getLogger("marserve.backend.handler"), "disabled", True)
    left = []

    def fail(_context):
        held = Activations()
        left.append(weakref.ref(held))
        raise RuntimeError("out of memory")

    handler.actions[stage, b"a"] = fail
    peer.send(b"a", number=1)
    assert peer.answer().code == 507
    gc.disable()
    try:
        handler.actions["inference", b"b"] = lambda _: left.append(left[0]() is None)
        peer.send(b"b", number=2)
        assert peer.answer().code == 200
    finally:
        gc.enable()
    assert left[1] is True


@either
@pytest.mark.parametrize("stage", STAGES)
def test_sys_exit_ends_the_process_from_any_stage_after_earlier_batches_are_answered(
    stage, handler, peer
):
    handler.actions[stage, b"b"] = lambda _: sys.exit(7)
    for gate in STAGES[STAGES.index(stage) + 1 :]:
        handler.gates.at(gate, b"a")
    peer.send(b"a", number=1)
    peer.send(b"b", number=2)
    for gate in STAGES[STAGES.index(stage) + 1 :]:
        handler.gates.wait_entered(gate, b"a")
        handler.gates.open(gate, b"a")
    assert peer.answer().number == 1
    assert repr(peer.end.exception(SECONDS)) == "SystemExit(7)"


@either
def test_a_batch_that_runs_alone_waits_for_those_before_it_and_holds_up_those_behind(handler, peer):
    handler.gates.at("postprocess", b"a")
    handler.gates.at("alone", b"why")
    peer.send(b"a", number=1)
    peer.send(b"why", number=2, explain="True")
    peer.send(b"c", number=3)
    handler.gates.wait_entered("postprocess", b"a")
    assert handler.alone == []
    handler.gates.open("postprocess", b"a")
    assert peer.answer().number == 1
    handler.gates.wait_entered("alone", b"why")
    assert len(handler.walks) == 1
    handler.gates.open("alone", b"why")
    replies = [peer.answer(), peer.answer()]
    assert [reply.number for reply in replies] == [2, 3]
    assert bytes(replies[0].predictions[0].body) == b"alone"


def test_pieces_of_overlapping_answers_reach_their_own_batch(handler, peer):
    handler.actions["inference", b"a"] = lambda context: context.send_intermediate(["half"])
    handler.gates.at("postprocess", b"a")
    peer.send(b"a", number=1)
    peer.send(b"b", number=2)
    handler.gates.wait_entered("postprocess", b"a")
    handler.gates.open("postprocess", b"a")
    seen = [peer.receive() for _ in range(5)]
    [piece] = [message for message in seen if isinstance(message, Piece)]
    assert (piece.number, piece.places, bytes(piece.predictions[0].body)) == (1, [0], b"half")


@either
def test_padding_is_not_answered_and_not_measured(handler, peer):
    peer.send(b"a", number=1, run_as=4)
    reply = peer.answer()
    assert len(handler.walks[0].data) == 4
    assert len(reply.predictions) == 1
    assert {tuple(row[5]) for row in reply.metrics} == {("1-0",)}


@either
def test_the_loop_ends_when_the_frontend_leaves_and_all_is_answered(handler, peer):
    handler.gates.at("inference", b"a")
    peer.send(b"a", number=1)
    peer.send(b"b", number=2)
    handler.gates.wait_entered("inference", b"a")
    peer.leave()
    handler.gates.open("inference", b"a")
    assert [peer.answer().number, peer.answer().number] == [1, 2]
    assert peer.end.result(SECONDS) is None


def test_a_message_that_is_no_batch_breaks_the_connection(peer):
    peer.send_message(Load("m", "/m", "h", 1, None, True, 1, "1"))
    outcome = peer.end
    assert "Load is not expected now" in str(outcome.exception(SECONDS))


@either
def test_the_loop_ends_when_the_connection_breaks_during_a_batch(handler, peer):
    handler.gates.at("postprocess", b"a")
    peer.send(b"a", number=1)
    handler.gates.wait_entered("postprocess", b"a")
    peer._sock.close()
    handler.gates.open("postprocess", b"a")
    assert isinstance(peer.end.exception(SECONDS), ConnectionError)


def test_the_next_batch_is_asked_for_in_time_to_be_prepared_and_not_before():
    pace = _Pace()
    pace.prepared(0.010)
    pace.predicted(0.100)
    assert pace.slack == 0.0  # one batch is too few
    pace.prepared(0.020)
    pace.predicted(0.080)
    assert pace.slack == pytest.approx(0.080 - 0.024, abs=0.003)
    pace.prepared(0.100)
    assert pace.slack < 0.0  # preparing takes longest
    for _ in range(8):
        pace.prepared(0.010)
    assert pace.slack > 0.06  # the slow one is forgotten
