import dataclasses
import socket
from pathlib import Path

import pytest
from fed_decoder import Decoder

from marserve.backend import worker
from marserve.backend.async_worker import new_loop, serve_concurrently
from marserve.backend.connection import FrontendConnection
from marserve.backend.context import Context
from marserve.backend.framing import encode
from marserve.backend.protocol import (
    Input,
    Load,
    Loaded,
    LoadFailure,
    LoadStarted,
    Message,
    Part,
    Piece,
    Predict,
    Reply,
    Trials,
)
from marserve.backend.service import Service

HANDLER = """
def handle(data, context):
    if data is None:
        return
    return [bytes(row["body"]) for row in data]
"""


def joined(*messages: Message) -> bytes:
    return b"".join(bytes(buffer) for each in messages for buffer in encode(each))


def batch(*bodies: bytes) -> Predict:
    return Predict(
        [Input(f"id-{i}", {}, [Part("body", "", each)]) for i, each in enumerate(bodies)]
    )


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(5.0)
        yield ours, theirs


@pytest.fixture
def serve(pair):
    """Run the worker's loop over what the frontend sent; its status, its answers after the first.

    The first is that a load begins.
    """
    ours, theirs = pair

    def served(data):
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        status = worker._serve(FrontendConnection(theirs))
        theirs.shutdown(socket.SHUT_WR)
        decoder, answers = Decoder(1 << 20), []
        while received := ours.recv(65536):
            answers += decoder.feed(received)
        if answers:
            assert answers.pop(0) == LoadStarted()
        return status, answers

    return served


@pytest.fixture
def load(tmp_path, monkeypatch):
    """A load of a model in ``tmp_path`` with this handler, under a name of the test's own."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(name, source=HANDLER, **changes):
        (tmp_path / f"{name}.py").write_text(source)
        plain = Load("m", str(tmp_path), f"{name}.py", 4, None, True, 1000, "1")
        return dataclasses.replace(plain, **changes)

    return make


def test_a_worker_loads_predicts_and_leaves_with_the_frontend(serve, load):
    data = joined(load("worker_echo"), batch(b"a", b"b"), batch(b"c"))
    status, answers = serve(data)
    assert status == 0
    # Where another test has loaded torch, it tells of its threads.
    assert dataclasses.replace(answers[0], threads=0) == Loaded()
    assert [[each.body for each in reply.predictions] for reply in answers[1:]] == [
        [b"a", b"b"],
        [b"c"],
    ]


def test_a_padded_batch_is_answered_for_its_own_inputs(serve, load):
    source = """
def handle(data, context):
    if data is not None:
        context.send_intermediate([bytes(row["body"]) for row in data])
        return [f"{len(data)}" for row in data]
"""
    padded = batch(b"a", b"b")
    padded.run_as, padded.number = 4, 9
    _, [_, piece, reply] = serve(joined(load("worker_padded", source), padded))
    assert (type(piece), piece.number, piece.places) == (Piece, 9, [0, 1])
    assert [each.body for each in piece.predictions] == [b"a", b"b"]
    assert [each.body for each in reply.predictions] == [b"4", b"4"]


PROFILED = """
class Handler:
    def initialize(self, context):
        self.sizes = []
        context.metrics.add_counter("Loaded", 1)

    def sample_input(self):
        return "a sample"

    def handle(self, data, context):
        context.metrics.add_counter("Batches", 1)
        if data[0]["body"] == "a sample":
            assert len(context.request_ids) == len(data) < 4
            self.sizes.append(len(data))
        return [sorted(set(self.sizes))] * len(data)
"""


def test_a_load_with_sizes_tells_their_costs_and_shows_nothing_else_of_profiling(
    serve, load, capfd
):
    loading = load("worker_profiled", PROFILED, trials=Trials(sizes=[1, 2, 4, 8], seconds=60.0))
    status, [loaded, reply] = serve(joined(loading, batch(b"x")))
    profiled = loaded.profiled
    assert status == 0
    assert [cost.size for cost in profiled.costs] == [1, 2]
    assert all(0 < cost.seconds < 60 and cost.peak_bytes >= 0 for cost in profiled.costs)
    assert "size 4 failed with status 503" in profiled.note
    assert [[row[1] for row in each.metrics] for each in (loaded, reply)] == [
        ["Loaded"],
        ["Batches"],
    ]
    assert b"".join(reply.predictions[0].body.split()) == b"[1,2]"


@pytest.mark.parametrize(("run_as", "status"), [(0, 0), (1, 0), (2, 1)])
def test_requests_of_a_coroutine_are_not_padded(run_as, status, pair):
    ours, theirs = pair
    alone = batch(b"x")
    alone.run_as = run_as
    ours.sendall(joined(alone))
    ours.shutdown(socket.SHUT_WR)
    loop = new_loop()
    service = Service(lambda data, _: data, Context("m", "/m", None, 1, None, "1"))
    load = Load("m", "/m", "h", 1, None, True, 1000, "1")
    assert serve_concurrently(loop, theirs, service, load) == status
    loop.close()


@pytest.mark.parametrize(
    ("name", "raised", "code", "message"),
    [
        ("worker_value", "ValueError('no weights')", 500, "ValueError: no weights"),
        ("worker_import", "ImportError('no torch')", 500, "ImportError: no torch"),
        ("worker_memory", "MemoryError()", 507, "MemoryError"),
        ("worker_cuda", "RuntimeError('CUDA error')", 507, "RuntimeError: CUDA error"),
        ("worker_runtime", "RuntimeError('other')", 500, "RuntimeError: other"),
        ("worker_cuda_value", "ValueError('CUDA')", 500, "ValueError: CUDA"),
    ],
)
def test_a_model_that_does_not_load_is_reported_with_its_reason_and_ends_the_worker(
    name, raised, code, message, serve, load
):
    source = f"def handle(data, context):\n    raise {raised}\n"
    status, answers = serve(joined(load(name, source), batch(b"never read")))
    permanent = name == "worker_import"
    assert (status, answers) == (1, [LoadFailure(code, message, permanent)])


@pytest.mark.parametrize(
    "data", [joined(batch(b"too soon")), joined(Reply()), b"\0\0\0\1garbage", joined(batch())]
)
def test_what_is_not_expected_ends_the_worker(data, serve):
    assert serve(data) == (1, [])


def test_the_frontend_gone_in_the_middle_of_a_message_breaks_the_connection(serve):
    assert serve(joined(batch(b"half a message"))[:20]) == (1, [])


def test_large_messages_arrive_as_they_were(pair):
    ours, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    sent = batch(b"x" * 70_000, b"y" * 70_000)
    FrontendConnection(theirs).send(sent)
    assert FrontendConnection(ours).receive() == sent


def test_the_score_is_higher_within_the_block_only(tmp_path):
    score = tmp_path / "oom_score_adj"
    for before, within in ((0, "500"), (-100, "400"), (999, "1000")):
        score.write_text(f"{before}\n")
        with worker.as_first_choice(score):
            assert score.read_text() == within
        assert int(score.read_text()) == before


def test_without_a_score_the_block_runs_all_the_same(tmp_path):
    with worker.as_first_choice(tmp_path / "none"):
        pass
    assert not list(tmp_path.iterdir())


def test_the_kernel_lets_a_process_lower_what_it_has_raised():
    score = Path("/proc/self/oom_score_adj")
    before = int(score.read_text())
    with worker.as_first_choice():
        assert int(score.read_text()) == min(before + 500, 1000)
    assert int(score.read_text()) == before
