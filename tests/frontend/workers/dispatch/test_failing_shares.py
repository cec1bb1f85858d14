"""What a share of failing requests costs the others, in virtual time: 20 ms a batch of up to 8."""

import asyncio
import itertools
import random
from functools import partial
from typing import Any

import pytest

from marserve.backend.protocol import Predict, Prediction, Reply
from marserve.frontend.batching.jobs import Group
from marserve.frontend.errors import ServeError
from marserve.frontend.workers.dispatch.batched import Batched

CLIENTS = 32
REQUESTS = 3000
WARM_UP = 600


def handler(batch: Predict, *, names: bool) -> Reply:
    """Fails for the first bad request, and names it or not."""
    ids = [input_.id for input_ in batch.inputs]
    bad = [place for place, id_ in enumerate(ids) if id_.startswith("bad")]
    if not bad:
        return Reply(predictions=[Prediction(id_.encode()) for id_ in ids])
    if names:
        return Reply(503, "Prediction failed", suspect=bad[0], raised_at="handler.py:3")
    return Reply(503, "Prediction failed")


async def rate_of_good(put: Any, share: float, *, distinct: bool) -> tuple[float, float]:
    """The rate of good requests that were answered, and which share of them was."""
    loop, chance = asyncio.get_running_loop(), random.Random(1)
    numbers, good, answered = itertools.count(), 0, 0
    began = loop.time()

    async def client() -> None:
        nonlocal began, good, answered
        while (number := next(numbers)) < REQUESTS:
            if number == WARM_UP:
                began, good, answered = loop.time(), 0, 0
            is_bad = chance.random() < share
            id_ = f"bad{number if distinct else ''}" if is_bad else f"good{number}"
            try:
                await put(id_, Group.PREDICT).future
            except ServeError:
                good += not is_bad
            else:
                good, answered = good + 1, answered + 1

    await asyncio.gather(*[client() for _ in range(CLIENTS)])
    return answered / (loop.time() - began), answered / good


@pytest.mark.parametrize(
    ("share", "distinct", "names", "least"),  # of the rate that the same clients have without
    [
        (0.01, False, False, 0.90),
        (0.10, False, False, 0.50),
        (0.01, True, True, 0.85),
        (0.10, True, True, 0.50),
        # A tenth of bad ones cannot be found in fewer than 0.47 runs for each request: 0.27.
        (0.01, True, False, 0.62),
        (0.03, True, False, 0.42),
        (0.10, True, False, 0.20),
        # Serving one by one does an eighth of what full batches do.
        (0.50, True, False, 0.11),
        (0.80, True, False, 0.11),
    ],
)
def test_good_requests_are_answered_and_as_fast_as_the_share_of_bad_ones_allows(
    share, distinct, names, least, run, served
):
    async def scenario():
        options = {"size": 8, "seconds": 0.02, "predict": [partial(handler, names=names)]}
        way = partial(Batched, timeout=60.0)
        async with served(way, batching={"delay": 0.02}, **options) as put:
            clean, _ = await rate_of_good(put, 0.0, distinct=False)
        async with served(way, batching={"delay": 0.02}, **options) as put:
            rate, answered = await rate_of_good(put, share, distinct=distinct)
        assert answered >= 0.99
        assert rate >= least * clean * (1.0 - share)

    run(scenario())
