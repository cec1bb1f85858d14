"""Long work on the event loop, in real time."""

import asyncio
import time

import pytest

from marserve.frontend.aio.long_work import LongWork, Steps


def busy(seconds: float, result: str = "done") -> Steps[str]:
    """Works as long in small steps."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield
    return result


def test_everybody_else_has_a_turn_meanwhile() -> None:
    async def scenario() -> None:
        long_work, turns = LongWork(), 0
        tasks = [asyncio.ensure_future(long_work.run(busy(0.1, str(n)))) for n in range(4)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns += 1
        assert [task.result() for task in tasks] == ["0", "1", "2", "3"]
        assert turns > 5

    asyncio.run(scenario())


def test_short_work_does_not_wait_for_long_work() -> None:
    async def scenario() -> None:
        long_work = LongWork()
        tasks = [asyncio.ensure_future(long_work.run(busy(0.2))) for _ in range(4)]
        await asyncio.sleep(0)
        assert await long_work.run(busy(0, "short")) == "short"
        assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_work_that_fails_or_is_given_up_lets_the_others_go_on() -> None:
    closed: list[bool] = []

    def failing() -> Steps[str]:
        yield from busy(0.02)
        raise ValueError("malformed")

    def endless() -> Steps[str]:
        try:
            yield from busy(60)
        finally:
            closed.append(True)
        return ""

    async def scenario() -> None:
        long_work = LongWork()
        given_up = asyncio.ensure_future(long_work.run(endless()))
        await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="malformed"):
            await long_work.run(failing())
        given_up.cancel()
        assert await long_work.run(busy(0.02)) == "done"
        assert closed == [True]

    asyncio.run(scenario())
