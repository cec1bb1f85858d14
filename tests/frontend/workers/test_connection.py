import asyncio
import socket
import struct
from contextlib import asynccontextmanager

import fakes
import pytest

from marserve.backend.framing import encode
from marserve.backend.protocol import (
    Load,
    Loaded,
    LoadFailure,
    Predict,
    Prediction,
    ProtocolError,
    Reply,
)
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.failures import (
    ConnectionLost,
    Disconnected,
    Poisoned,
    ResponseTimedOut,
)

LOAD = Load("m", "/m", "h", 1, None, True, 1000, "1")
GARBAGE = struct.pack("!I", 3) + b"abc"


@pytest.fixture
def connected():
    """A connection to a fake worker with this life."""

    @asynccontextmanager
    async def connect(**life):
        worker = fakes.FakeWorker(1, fakes.Life(**life))
        connection = await WorkerConnection.from_socket(
            worker.sock, max_response_bytes=1000, name="W-9000"
        )
        try:
            yield connection, worker
        finally:
            connection.close()
            await worker.stop(0)

    return connect


def ask(
    connection: WorkerConnection, *bodies: bytes, timeout: float = 5.0
) -> asyncio.Future[Reply]:
    """Send a batch; the future gets the reply, or the reason why there will be none."""
    reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

    def on_lost(lost: asyncio.Future[ConnectionLost]) -> None:
        if not reply.done():
            reply.set_exception(lost.result())

    connection.lost.add_done_callback(on_lost)
    batch = Predict([fakes.make_input(body) for body in bodies])
    connection.predict(batch, timeout, reply.set_result)
    return reply


async def load_and_ask(connection: WorkerConnection) -> None:
    await connection.load(LOAD, 5.0, 5.0)
    await ask(connection, b"a")


def test_a_model_is_loaded_and_batches_are_answered_in_turn(run, connected):
    async def scenario():
        async with connected(load=Loaded(threads=7)) as (connection, worker):
            assert await connection.load(LOAD, 5.0, 5.0) == Loaded(threads=7)
            assert worker.loaded == [LOAD]
            for bodies in ([b"a", b"b"], [b"c"]):
                reply = await ask(connection, *bodies)
                assert [each.body for each in reply.predictions] == bodies

    run(scenario())


def test_a_report_of_the_worker_is_an_answer_like_another(run, connected):
    async def scenario():
        async with connected(load=LoadFailure(507, "no memory"), predict=[Reply(503, "no")]) as (
            connection,
            _,
        ):
            assert await connection.load(LOAD, 5.0, 5.0) == LoadFailure(507, "no memory")
            assert await ask(connection, b"a") == Reply(503, "no", number=1)
            assert not connection.lost.done()

    run(scenario())


def test_a_worker_that_can_serve_no_more_has_answered_and_is_lost(run, connected):
    async def scenario():
        last = Reply(503, "Prediction failed", poisoned="RuntimeError: device-side assert")
        async with connected(predict=[last]) as (connection, _):
            await connection.load(LOAD, 5.0, 5.0)
            lost_first = []
            connection.on_lost = lambda: lost_first.append(connection.has_answered)
            reply = asyncio.get_running_loop().create_future()
            connection.predict(Predict([fakes.make_input(b"a")]), 5.0, reply.set_result)
            assert (await reply).code == 503
            assert lost_first == [True]
            assert isinstance(connection.lost.result(), Poisoned)

    run(scenario())


def test_the_late_answer_to_a_cancelled_probe_is_dropped(run, connected):
    async def scenario():
        async with connected(seconds=2.0) as (connection, worker):
            await connection.load(LOAD, 5.0, 5.0)
            answered = []

            def probe(body):
                request = Predict([fakes.make_input(body)])
                connection.probe(
                    request, lambda reply: answered.append(bytes(reply.predictions[0].body))
                )
                return request.number

            connection.cancel(probe(b"first"))
            probe(b"second")
            assert (await ask(connection, b"a", timeout=9.0)).code == 200
            assert worker.batches == [[b"first"], [b"second"], [b"a"]]
            assert answered == [b"second"]

    run(scenario())


def test_a_message_whose_callback_raises_is_named_in_the_log(run, connected, caplog):
    def fail(_reply):
        raise asyncio.InvalidStateError

    async def scenario():
        async with connected() as (connection, _):
            await connection.load(LOAD, 5.0, 5.0)
            connection.predict(Predict([fakes.make_input(b"a")]), 5.0, fail)
            lost = await connection.lost
            assert str(lost) == "The server failed at a Reply message: InvalidStateError"

    run(scenario())
    (record,) = caplog.records
    assert record.getMessage() == "W-9000: a Reply message cannot be handled."
    assert record.exc_info is not None


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("die", "Worker disconnected."),
        ("hang", "did not respond in given time"),
        (GARBAGE, "broke the protocol: a frame of 3 bytes"),
        (b"".join(encode(LOAD)), "sent Load unasked"),
        (struct.pack("!I", 1 << 31), "broke the protocol: a frame of 2147483648 bytes"),
    ],
)
@pytest.mark.parametrize("stage", ["load", "predict"])
def test_a_worker_that_cannot_answer_is_lost_with_the_reason(stage, answer, why, run, connected):
    life = {"load": answer} if stage == "load" else {"predict": [answer]}

    async def scenario():
        async with connected(**life) as (connection, _):
            with pytest.raises(ConnectionLost, match=why):
                await load_and_ask(connection)
            assert why in str(connection.lost.result())

    run(scenario())


@pytest.mark.parametrize("predictions", [0, 1, 3])
def test_another_number_of_predictions_than_inputs_loses_the_worker(predictions, run, connected):
    reply = Reply(predictions=[Prediction(b"")] * predictions)

    async def scenario():
        async with connected(predict=[reply]) as (connection, _):
            with pytest.raises(ConnectionLost, match=f"{predictions} predictions came for 2"):
                await ask(connection, b"a", b"b")

    run(scenario())


def test_an_answer_nobody_asked_for_loses_the_worker(run, connected):
    twice = b"".join(encode(Loaded(threads=7))) * 2

    async def scenario():
        async with connected(load=twice) as (connection, _):
            assert await connection.load(LOAD, 5.0, 5.0) == Loaded(threads=7)
            assert "sent Loaded unasked" in str(await connection.lost)

    run(scenario())


def test_the_timeout_is_counted_for_each_exchange_alone(run, loop, connected):
    async def scenario():
        async with connected(seconds=0.9) as (connection, worker):
            for _ in range(5):
                await ask(connection, b"a", timeout=1.0)
            await asyncio.sleep(100.0)
            assert not connection.lost.done()
            worker.life.seconds = 1.1
            began = loop.time()
            with pytest.raises(ConnectionLost, match="given time"):
                await ask(connection, b"a", timeout=1.0)
            assert loop.time() - began == pytest.approx(1.0)

    run(scenario())


def test_a_worker_is_not_blamed_for_a_time_in_which_the_frontend_stood_still(run, loop, connected):
    async def scenario():
        async with connected(seconds=2.5) as (connection, worker):
            answer = ask(connection, b"a", timeout=3.0)
            await asyncio.sleep(1.0)
            loop.now += 5.0  # stopped: the reply and the end of the timeout come in one turn
            assert (await answer).code == 200
            worker.life.seconds = 100.0
            hung, began = ask(connection, b"a", timeout=3.0), loop.time()
            await asyncio.sleep(1.0)
            loop.now += 5.0
            with pytest.raises(ConnectionLost, match="given time"):
                await hung
            assert loop.time() - began == pytest.approx(9.0)  # 6 s, and the 3 s it was late

    run(scenario())


def test_after_the_end_a_batch_is_neither_sent_nor_answered(run, connected):
    async def scenario():
        async with connected() as (connection, worker):
            connection.close()
            connection.close()
            answers = []
            connection.predict(Predict([fakes.make_input()]), 5.0, answers.append)
            await fakes.drain_loop()
            assert (answers, worker.batches) == ([], [])
            with pytest.raises(ConnectionLost, match="was closed"):
                await connection.load(LOAD, 5.0, 5.0)

    run(scenario())


def test_a_batch_too_large_for_a_frame_is_refused_and_the_worker_lives(run, connected):
    class Huge(bytes):
        def __len__(self):
            return 1 << 32

    async def scenario():
        async with connected() as (connection, _):
            with pytest.raises(ProtocolError):
                connection.predict(Predict([fakes.make_input(Huge())]), 5.0, lambda _: None)
            assert (await ask(connection, b"next")).predictions[0].body == b"next"

    run(scenario())


def test_large_batches_and_answers_come_through(run, connected):
    body = bytes(range(256)) * 8192

    async def scenario():
        async with connected() as (connection, _):
            assert (await ask(connection, body)).predictions[0].body == body

    run(scenario())


@pytest.mark.parametrize("sizes", [[], [2], [1, 5], [5, 1]])
def test_a_reply_may_be_as_long_as_the_largest_batch_so_far_allows(sizes, run):
    allowed = max(sizes, default=0) * 1000 + 16 * 1024 * 1024

    async def lost_after(length):
        ours, theirs = socket.socketpair()
        with theirs:
            connection = await WorkerConnection.from_socket(ours, max_response_bytes=1000)
            for size in sizes:
                connection.predict(Predict([fakes.make_input()] * size), 5.0, lambda _: None)
            theirs.sendall(struct.pack("!I", length))
            await fakes.drain_loop()
            theirs.shutdown(socket.SHUT_WR)
            return str(await connection.lost)

    async def scenario():
        assert "allowed are 10 to " + str(allowed) in await lost_after(allowed + 1)
        assert await lost_after(allowed) == "Worker disconnected."

    run(scenario())


@pytest.mark.parametrize(("answer", "kind"), [("hang", ResponseTimedOut), ("die", Disconnected)])
def test_silence_is_distinguished_from_other_ends(answer, kind, run, connected):
    async def scenario():
        async with connected(predict=[answer]) as (connection, _):
            connection.predict(Predict([fakes.make_input()]), 5.0, lambda _: None)
            assert type(await connection.lost) is kind

    run(scenario())


def test_an_answer_to_another_batch_never_reaches_this_one(run, connected):
    stray = b"".join(encode(Reply(predictions=[Prediction(b"somebody else's")], number=7)))

    async def scenario():
        async with connected(predict=[stray]) as (connection, _):
            answers = []
            connection.predict(Predict([fakes.make_input(b"a")]), 5.0, answers.append)
            assert "sent Reply unasked" in str(await connection.lost)
            assert answers == []

    run(scenario())


def test_a_probe_is_answered_and_counts_for_nothing(run, connected):
    async def scenario():
        async with connected() as (connection, _):
            await connection.load(LOAD, 5.0, 5.0)
            answered = asyncio.get_running_loop().create_future()
            connection.probe(Predict([fakes.make_input(b"a")]), answered.set_result)
            assert (await answered).predictions
            assert not connection.has_answered
            await ask(connection, b"b")
            assert connection.has_answered

    run(scenario())


def test_a_probe_without_an_answer_is_no_hang(run, connected):
    async def scenario():
        async with connected(predict=["hang"]) as (connection, _):
            await connection.load(LOAD, 1.0, 1.0)
            connection.probe(Predict([fakes.make_input(b"a")]), lambda _reply: None)
            await asyncio.sleep(60)  # of virtual time
            assert not connection.lost.done()

    run(scenario())
