"""A stateful model version over a fake worker, with each way to dispatch requests."""

import asyncio
from typing import Any

import fakes
import pytest

from marserve.frontend.errors import BadRequest, SequenceOver

KINDS: dict[str, dict[str, Any]] = {
    "batched": {},
    "outstanding": {"outstanding_batches": 3},
    "continuous": {"continuous_batching": True},
    "asynchronous": {"asynchronous": True},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def serve(request, serve_model):
    """A stateful model with ready workers, dispatched to in one of the ways."""

    def make(*lives, **options):
        limits = {"sequence_max_idle": 60.0, "max_sequences": 4, "max_sequence_queue": 9}
        return serve_model(*lives, stateful=True, **limits, **request.param, **options)

    return make


@pytest.fixture
def send():
    def begin(model, sequence_id, body):
        input_ = fakes.make_input(body, ts_request_sequence_id=sequence_id)
        request = fakes.make_request(input_)
        return asyncio.ensure_future(model.predict(request))

    return begin


def test_the_requests_of_a_sequence_reach_one_worker_in_order(run, serve, send):
    async def scenario():
        async with serve(fakes.Life(seconds=1.0), workers=2) as model:
            sent = [send(model, id_, f"{id_}{n}".encode()) for n in range(3) for id_ in "ab"]
            assert [(await each).body for each in sent] == [
                b"a0",
                b"b0",
                b"a1",
                b"b1",
                b"a2",
                b"b2",
            ]
            launcher = model.workers._host.launcher
            received = [b"".join(map(b"".join, each.batches)) for each in launcher.workers]
            assert received == [b"a0a1a2", b"b0b1b2"]
            assert [model.workers.sequences_of(worker) for worker in model.workers] == [1, 1]
            assert model.has_sequence("a")
            model.leave_sequence("a")
            assert not model.has_sequence("a")

    run(scenario())


def test_a_worker_that_dies_ends_its_sequences_and_their_requests_are_not_retried(run, serve, send):
    async def scenario():
        lives = fakes.Life(predict=["die"], seconds=1.0), fakes.Life()
        async with serve(*lives) as model:
            sent = [send(model, "a", b"0"), send(model, "a", b"1")]
            for each in sent:
                with pytest.raises(SequenceOver, match="killed by SIGSEGV"):
                    await each
            with pytest.raises(SequenceOver):
                await send(model, "a", b"2")
            await asyncio.sleep(1.0)
            assert (await send(model, "b", b"3")).body == b"3"
            assert model.workers._host.launcher.workers[1].batches == [[b"3"]]

    run(scenario())


def test_a_worker_that_is_stopped_answers_what_it_has_accepted(run, serve, send):
    async def scenario():
        async with serve(fakes.Life(seconds=1.0), workers=2) as model:
            sent = [send(model, id_, id_.encode()) for id_ in "abcbb"]
            await fakes.drain_loop()
            [_, second] = model.workers  # the first has a and c
            _, retired = model.workers.resize(1, 1)
            assert retired == [second]
            await model.workers.retire(retired, 10.0)
            assert [(await each).body for each in sent] == [b"a", b"b", b"c", b"b", b"b"]
            assert model.has_sequence("a")
            assert not model.has_sequence("b")

    run(scenario())


def test_rows_of_one_request_are_refused(run, serve):
    async def scenario():
        async with serve() as model:
            input_ = fakes.make_input()
            request = fakes.make_request(input_)
            with pytest.raises(BadRequest, match="one by one"):
                await model.predict_all(request, [input_] * 2)

    run(scenario())
