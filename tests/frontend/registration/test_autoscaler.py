import asyncio
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import LoadFailure
from marserve.frontend.configuration.model_schema import Autoscaling
from marserve.frontend.errors import WorkersFailed
from marserve.frontend.registration.autoscaler import Autoscaler, Demand, ScalingDecision
from marserve.frontend.serving.model_version import ModelVersion

RULE = Autoscaling(grow_after=1.0, shrink_after=60.0)
LATE = 1.1

# -- decisions -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("demand", "step"),
    [
        (Demand(workers=1, ready=1, busy=1, waited=LATE), 1),
        (Demand(workers=2, ready=2, busy=2, waited=LATE), 1),
        (Demand(workers=1, ready=1, busy=1, waited=1.0), 0),  # not yet
        (Demand(workers=2, ready=2, busy=1, waited=LATE), 0),  # a worker is idle: a batch fills
        (Demand(workers=2, ready=1, busy=1, waited=LATE), 0),  # a worker is starting
        (Demand(workers=3, ready=3, busy=3, waited=LATE), 0),  # there may be no more
        (Demand(workers=0, ready=0, busy=0, waited=0.0), 0),  # no request can wait
    ],
)
def test_when_a_model_gets_one_more(demand, step):
    assert ScalingDecision(RULE).step(0.0, demand, 1, 3) == step


def steps_of(
    decision: ScalingDecision, demands: list[tuple[float, Demand]], low: int = 1
) -> list[int]:
    return [decision.step(now, demand, low, 3) for now, demand in demands]


def refusing(workers: int, refused: int) -> Demand:
    return Demand(workers, workers, workers, 0.0, refused)


@pytest.mark.parametrize(
    ("demands", "steps"),
    [
        # Refused from step to step for a second, and again for another one.
        (
            [(at / 2, refusing(1 if at < 3 else 2, 5 + at)) for at in range(6)],
            [0, 0, 1, 0, 0, 1],
        ),
        # A burst that is over.
        ([(0, refusing(1, 5)), (0.5, refusing(1, 5)), (1, refusing(1, 5))], [0, 0, 0]),
        # There may be no more.
        ([(0, refusing(3, 5)), (1, refusing(3, 9)), (2, refusing(3, 12))], [0, 0, 0]),
    ],
)
def test_a_model_that_keeps_refusing_gets_one_more(demands, steps):
    assert steps_of(ScalingDecision(RULE), demands) == steps


def idle(workers: int) -> Demand:
    return Demand(workers, workers, workers - 1, 0.0)


BUSY = Demand(2, 2, 2, 0.5)


@pytest.mark.parametrize(
    ("demands", "steps"),
    [
        ([(0, idle(2)), (59, idle(2)), (60, idle(2))], [0, 0, -1]),
        ([(0, idle(2)), (30, BUSY), (60, idle(2)), (119, idle(2)), (120, idle(2))],
         [0, 0, 0, 0, -1]),
        ([(0, idle(3)), (60, idle(3)), (61, idle(2)), (119, idle(2)), (120, idle(2))],
         [0, -1, 0, 0, -1]),
        ([(0, idle(1)), (600, idle(1))], [0, 0]),  # the last one stays
        # The time of the last one alone does not count for one that comes later.
        ([(0, idle(1)), (600, idle(2)), (659, idle(2))], [0, 0, 0]),
    ],
)  # fmt: skip
def test_when_a_model_loses_one(demands, steps):
    assert steps_of(ScalingDecision(RULE), demands) == steps


def test_never_below_the_minimum_and_never_the_last():
    assert steps_of(ScalingDecision(RULE), [(0, idle(2)), (99, idle(2))], low=2) == [0, 0]
    assert steps_of(ScalingDecision(RULE), [(0, idle(1)), (99, idle(1))], low=0) == [0, 0]


def test_after_a_failure_it_waits_longer_and_longer_up_to_an_hour():
    decision, now, pauses = ScalingDecision(RULE), 0.0, []
    late = Demand(1, 1, 1, LATE)
    for _ in range(9):
        began = now
        decision.failed(now)
        while not decision.step(now, late, 1, 3):
            now += 1
        pauses.append(now - began)
    assert pauses == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    decision.succeeded()
    decision.failed(now)
    assert not decision.step(now + 59, late, 1, 3)
    assert decision.step(now + 60, late, 1, 3)


# -- acting on them --------------------------------------------------------------------------------


async def set_current_count(model: ModelVersion, count: int) -> None:
    """As the manager does it, without its locks."""
    started, retired = model.workers.set_current_count(count)
    await model.workers.retire(retired, 0)
    for worker in started:
        if await worker.first_outcome() is not None:
            await model.workers.retire(model.workers.remove(worker), 0)
            raise WorkersFailed("no memory")


def ask(model: ModelVersion, count: int) -> list["asyncio.Future[Any]"]:
    return [
        asyncio.ensure_future(model.predict(fakes.make_request(fakes.make_input())))
        for _ in range(count)
    ]


def test_load_brings_a_worker_and_silence_takes_it_away(run, loop, serve_model):
    async def scenario():
        life = fakes.Life(seconds=2.0)
        async with serve_model(life, max_workers=2, autoscale=RULE) as model:
            scaler = asyncio.ensure_future(Autoscaler([model], set_current_count, loop.time).run())
            requests = ask(model, 6)
            await asyncio.gather(*requests)
            assert loop.now < 1000 + 6 * 2.0
            assert model.workers.ready == 2
            await asyncio.sleep(50)
            assert model.workers.ready == 2
            await asyncio.sleep(15)
            assert model.workers.ready == 1
            assert (model.workers.min_workers, model.workers.max_workers) == (1, 2)
            scaler.cancel()
            await asyncio.wait({scaler})

    run(scenario())


def test_a_worker_that_does_not_come_up_is_not_tried_again_and_again(run, loop, serve_model):
    async def scenario():
        lives = fakes.Life(seconds=1000.0), fakes.Life(load=LoadFailure(507, "no memory"))
        async with serve_model(
            *lives, max_workers=2, autoscale=RULE, response_timeout=2000
        ) as model:
            asked = []

            async def noted(model_, count):
                asked.append(loop.now)
                await set_current_count(model_, count)

            scaler = asyncio.ensure_future(Autoscaler([model], noted, loop.time).run())
            requests = ask(model, 2)
            await asyncio.sleep(500)
            assert len(asked) == 4  # after 1, 61, 181 and 421 s
            assert (model.workers.ready, len(model.workers)) == (1, 1)
            scaler.cancel()
            await asyncio.wait({scaler})
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)

    run(scenario())


def test_models_without_the_switch_are_left_alone(run, loop, serve_model):
    async def scenario():
        async with serve_model(fakes.Life(seconds=2.0), max_workers=2) as model:
            scaler = asyncio.ensure_future(Autoscaler([model], set_current_count, loop.time).run())
            await asyncio.gather(*ask(model, 6))
            assert len(model.workers) == 1
            scaler.cancel()
            await asyncio.wait({scaler})

    run(scenario())
