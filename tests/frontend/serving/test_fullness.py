import asyncio
from collections.abc import Callable
from typing import Any

import fakes
import pytest

from marserve.frontend.errors import NoWorker
from marserve.frontend.serving.fullness import Fullness, Use

Call = Callable[..., Any]


def test_it_is_full_a_little_early_and_stays_so_until_there_is_some_room():
    fullness = Fullness()
    shares = [0.0, 0.89, 0.9, 2.0, 0.89, 0.6, 0.59, 0.89, 0.9]
    full = [bool(fullness.reason(Use(share, "Why."))) for share in shares]
    assert full == [False, False, True, True, True, True, False, False, True]


def test_the_reason_is_what_is_used_most():
    fullness = Fullness()
    assert fullness.reason(Use(0.95, "The queue."), Use(1.2, "The goal.")) == "The goal."
    assert fullness.reason(Use(0.7, "The queue."), Use(0.1, "The goal.")) == "The queue."
    assert fullness.reason(Use(0.5, "The queue."), Use(0.1, "The goal.")) == ""


def test_a_model_is_full_when_its_queue_nearly_is_and_ready_again_when_it_drains(
    run, serve_model, ask
):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0), batching={"queue_size": 10}) as model:
            accepted = [ask(model) for _ in range(9)]  # one of them is in the worker
            await fakes.drain_loop()
            assert model.why_full(0.0) == ""
            accepted.append(ask(model))
            await fakes.drain_loop()
            assert model.why_full(0.0) == "Nearly all places to wait are taken."
            await asyncio.sleep(3.5)  # six wait
            assert model.why_full(0.0)
            await asyncio.sleep(1.0)
            assert model.why_full(0.0) == ""
            await asyncio.gather(*accepted)

    run(scenario())


def test_a_full_queue_tells_when_to_try_again(run, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0), batching={"queue_size": 2}) as model:
            model.batcher.seed([(1, 1.0)])
            accepted = [ask(model) for _ in range(3)]
            await fakes.drain_loop()
            with pytest.raises(NoWorker) as refused:
                await ask(model)
            assert refused.value.retry_after == 4
            await asyncio.gather(*accepted)

    run(scenario())


def test_without_workers_nobody_knows_when_to_try_again(run, serve_model, ask):
    async def scenario():
        async with serve_model(workers=0) as model:
            with pytest.raises(NoWorker) as refused:
                await ask(model)
            assert refused.value.retry_after is None

    run(scenario())


def test_a_model_is_full_while_its_listener_is(run, serve_model):
    async def scenario():
        async with serve_model(fakes.Life()) as model:
            assert model.why_full(0.95) == "Nearly as many bytes are in flight as are allowed."
            assert model.why_full(0.3) == ""

    run(scenario())


def test_with_job_tickets_a_model_is_full_when_none_is_left(run, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(seconds=1.0), use_job_ticket=True) as model:
            assert model.why_full(0.0) == ""
            accepted = ask(model)
            await fakes.drain_loop()
            assert model.why_full(0.0) == "Nearly all places to wait are taken."
            await accepted
            assert model.why_full(0.0) == ""

    run(scenario())


def test_a_stateful_model_is_full_of_sequences(run, serve_model, ask):
    async def scenario():
        async with serve_model(fakes.Life(), stateful=True, sequence_max_idle=1.0) as model:
            assert model.why_full(0.0) == ""
            for _ in range(model.settings.sequence_limits.max_sequences):
                await ask(model)  # each opens one
            assert model.why_full(0.0) == "Nearly all sequences are open."
            with pytest.raises(NoWorker) as refused:
                await ask(model)
            assert refused.value.retry_after == 1

    run(scenario())
