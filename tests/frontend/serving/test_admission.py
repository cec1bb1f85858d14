import asyncio
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import LoadFailure, Prediction, Reply
from marserve.frontend.errors import (
    ModelNotFound,
    NoWorker,
    RequestExpired,
    ServeError,
    ServerStopping,
    WorkerDied,
)
from marserve.frontend.serving.predict_request import RequestOptions

Call = Callable[..., Any]


@pytest.mark.parametrize(
    ("by_version", "named"), [(True, 'Model "m" Version 1.0" has'), (False, 'Model "m" has')]
)
def test_without_a_worker_there_is_no_waiting(by_version, named, run, serve_model, ask):
    async def scenario():
        async with serve_model(workers=0) as model:
            with pytest.raises(NoWorker, match=f"^{named} no worker to serve inference request"):
                await ask(model, by_version=by_version)

    run(scenario())


def test_a_full_queue_refuses_the_next_and_takes_it_when_there_is_room(run, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0), batching={"queue_size": 2}) as model:
            accepted = [ask(model) for _ in range(3)]
            await fakes.drain_loop()
            with pytest.raises(NoWorker):
                await ask(model)
            await asyncio.sleep(1.5)
            accepted.append(ask(model))
            assert len(await asyncio.gather(*accepted)) == 4

    run(scenario())


def test_an_async_model_refuses_when_its_queue_is_full(run, serve_model, ask):
    limits = {"asynchronous": True, "outstanding_batches": 2, "batching": {"queue_size": 3}}

    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0), **limits) as model:
            accepted = [ask(model) for _ in range(2)]
            await fakes.drain_loop()
            accepted += [ask(model) for _ in range(3)]
            await fakes.drain_loop()
            with pytest.raises(NoWorker):
                await ask(model)
            assert len(await asyncio.gather(*accepted)) == 5

    run(scenario())


def test_rows_beyond_the_capacity_are_queued_in_pieces(run, serve_model, answers_to, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0), batching={"queue_size": 4}) as model:
            first = ask(model)
            await fakes.drain_loop()
            rows = asyncio.create_task(answers_to(model, *[b"x"] * 9))
            await fakes.drain_loop()
            assert (len(model.queue), model.pending) == (2, 10)
            others = [ask(model), ask(model)]
            await fakes.drain_loop()
            assert len(model.queue) == 4
            with pytest.raises(NoWorker, match="The queue is full"):
                await answers_to(model, *[b"x"] * 2)
            await asyncio.gather(first, *others)
            assert await rows == [b"x"] * 9
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


def test_a_request_that_waits_too_long_expires_and_gives_its_seat_back(run, loop, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=9.0), client_timeout=2.0) as model:
            began = loop.time()
            waiting = [ask(model) for _ in range(2)]
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert [type(result) for result in results] == [RequestExpired] * 2
            assert "clientTimeoutInMills=2000" in str(results[0])
            assert loop.time() - began == pytest.approx(2.0)
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


def test_rows_expire_together(run, loop, serve_model, answers_to):
    async def scenario():
        async with serve_model(fakes.Life(seconds=9.0), client_timeout=2.0) as model:
            began = loop.time()
            with pytest.raises(RequestExpired, match="clientTimeoutInMills=2000"):
                await answers_to(model, *[b"x"] * 3)
            assert loop.time() - began == pytest.approx(2.0)
            assert (len(model.queue), model.pending) == (0, 0)
        gc.collect()

    run(scenario())


@pytest.mark.parametrize(
    ("options", "whose"),
    [
        ({}, "clientTimeoutInMills=2000"),
        ({"options": RequestOptions(timeout=1.5)}, "X-Timeout-Ms=1500"),
    ],
)
def test_a_request_that_took_too_long_to_read_reaches_no_worker(
    run, loop, serve_model, options, whose
):
    async def scenario():
        async with serve_model(client_timeout=2.0) as model:
            arrived = loop.time() - 2.0
            request = fakes.make_request(fakes.make_input(b"x"), arrived, **options)
            with pytest.raises(RequestExpired, match=whose):
                await model.predict(request)
            with pytest.raises(RequestExpired, match=whose):
                await model.predict_all(request, [request.input] * 2)
            assert len(model.batcher.history) == 0
            assert (len(model.queue), model.pending) == (0, 0)

    run(scenario())


def test_when_the_last_worker_gives_up_those_who_wait_are_answered(run, serve_model, ask):
    async def scenario():
        lives = [fakes.Life(predict=["die"], seconds=1.0)]
        async with serve_model(*lives, max_retry_timeout=0) as model:
            results = await asyncio.gather(*(ask(model) for _ in range(3)), return_exceptions=True)
            assert [type(result) for result in results] == [WorkerDied, NoWorker, NoWorker]
            with pytest.raises(NoWorker):
                await ask(model)

    run(scenario())


def test_a_model_that_cannot_be_loaded_again_refuses_with_the_reason_until_it_can(
    run, serve_model, ask
):
    why = "Its worker has failed: ValueError: no weights"
    broken = fakes.Life(load=LoadFailure(500, "ValueError: no weights"))

    async def scenario():
        async with serve_model(fakes.Life(), broken, broken, fakes.Life()) as model:
            launcher = model._host.launcher
            launcher.workers[0].crash()
            await asyncio.sleep(0.5)
            assert len(launcher.workers) == 2
            waiting = ask(model, b"a")  # one failure may pass
            await fakes.drain_loop()
            assert len(model.queue) == 1
            with pytest.raises(NoWorker, match=why):
                await waiting
            assert len(launcher.workers) == 3
            with pytest.raises(NoWorker, match=why):
                await ask(model, b"b")
            with pytest.raises(NoWorker, match=why):
                await ask(model, describe=True)
            await asyncio.sleep(10.0)
            assert (await ask(model, b"c")).body == b"c"

    run(scenario())


def test_a_worker_that_can_serve_is_enough_to_take_requests(run, serve_model, ask):
    broken = fakes.Life(load=LoadFailure(500, "ValueError: no weights"))

    async def scenario():
        async with serve_model(fakes.Life(), broken) as model:
            [second], _ = model.workers.resize(2, 2)
            assert await second.first_outcome() is not None
            assert (await ask(model, b"a")).body == b"a"
            await model.workers.retire(model.workers.remove(next(iter(model.workers))), 0)
            with pytest.raises(NoWorker, match="no weights"):
                await ask(model, b"b")

    run(scenario())


def test_draining_waits_for_those_who_are_in_and_refuses_others(run, loop, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0)) as model:
            inside = [ask(model, body) for body in (b"a", b"b")]
            await fakes.drain_loop()
            model.admission.refusal = ServerStopping
            with pytest.raises(ServerStopping):
                await ask(model)
            began = loop.time()
            await model.close(60.0)
            assert loop.time() - began == pytest.approx(2.0)
            assert [task.result().body for task in inside] == [b"a", b"b"]

    run(scenario())


def test_draining_gave_those_up_whose_worker_was_just_being_replaced(run, serve_model, ask):
    async def scenario():
        lives = fakes.Life(predict=["die"]), fakes.Life(start_seconds=5.0)
        async with serve_model(*lives) as model:
            inside = [ask(model, body) for body in (b"a", b"b")]
            await asyncio.sleep(1.0)
            assert not model.workers.ready
            await model.close(60.0)
            assert [task.result().body for task in inside] == [b"a", b"b"]

    run(scenario())


def test_draining_does_not_wait_for_a_worker_that_has_never_loaded_its_model(
    run, loop, serve_model, ask
):
    async def scenario():
        async with serve_model(fakes.Life(load="hang"), workers=0) as model:
            model.workers.resize(1, 1)
            await asyncio.sleep(1.0)
            inside = ask(model)
            await fakes.drain_loop()
            began = loop.time()
            await model.close(60.0)
            assert loop.time() - began < 5.0
            assert isinstance(inside.exception(), ServeError)

    run(scenario())


def test_draining_does_not_outlast_its_time(run, loop, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=9.0)) as model:
            inside = [ask(model) for _ in range(2)]
            await fakes.drain_loop()
            model.admission.refusal = ServerStopping
            began = loop.time()
            await model.close(2.0)
            assert loop.time() - began == pytest.approx(2.0)
            results = await asyncio.gather(*inside, return_exceptions=True)
            assert [type(result) for result in results] == [WorkerDied, ServerStopping]

    run(scenario())


def test_requests_that_found_a_version_which_has_left_go_to_its_successor(
    run, serve_model, ask, answers_to
):
    async def scenario():
        def answer(predict):
            return Reply(predictions=[Prediction(b"new") for _ in predict.inputs])

        async with serve_model() as old, serve_model(fakes.Life(predict=[answer])) as new:
            new.version = "2.0"
            old.admission.refusal = partial(ModelNotFound, "Model not found: m")
            old.hand_over(new)
            # The bodies of these were still being read when the version left.
            old.check(fakes.make_request(fakes.make_input()))
            assert (await ask(old)).body == b"new"
            assert await answers_to(old, b"a", b"b") == [b"new", b"new"]
            with pytest.raises(ModelNotFound):
                await ask(old, by_version=True)
            new.version = old.version  # the same one, registered again
            assert (await ask(old, by_version=True)).body == b"new"

    run(scenario())
