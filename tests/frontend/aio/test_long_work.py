"""Long work on the event loop, in real time."""

import asyncio
import contextlib
import time

import pytest
from steps import result_of

from marserve.frontend.aio.long_work import LongWork, Steps, joined


def busy(seconds: float, result: str = "done") -> Steps[str]:
    """Works as long in small steps."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield 0
    return result


def test_everybody_else_has_a_turn_meanwhile():
    async def scenario():
        long_work, turns = LongWork(), 0
        tasks = [asyncio.ensure_future(long_work.run(busy(0.1, str(n)))) for n in range(4)]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns += 1
        assert [task.result() for task in tasks] == ["0", "1", "2", "3"]
        assert turns > 5

    asyncio.run(scenario())


def test_short_work_does_not_wait_for_long_work():
    async def scenario():
        long_work = LongWork()
        tasks = [asyncio.ensure_future(long_work.run(busy(0.2))) for _ in range(4)]
        await asyncio.sleep(0)
        assert await long_work.run(busy(0, "short")) == "short"
        assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)

    asyncio.run(scenario())


def test_work_that_fails_or_is_given_up_lets_the_others_go_on():
    closed = []

    def failing():
        yield from busy(0.02)
        raise ValueError("malformed")

    def endless():
        try:
            yield from busy(60)
        finally:
            closed.append(True)
        return ""

    async def scenario():
        long_work = LongWork()
        given_up = asyncio.ensure_future(long_work.run(endless()))
        await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="malformed"):
            await long_work.run(failing())
        given_up.cancel()
        assert await long_work.run(busy(0.02)) == "done"
        assert closed == [True]

    asyncio.run(scenario())


def test_pieces_of_new_work_that_come_at_once_share_a_slice():
    async def scenario():
        long_work, turns = LongWork(), 0
        tasks = [asyncio.ensure_future(long_work.run(busy(0.004))) for _ in range(50)]
        while not all(task.done() for task in tasks):
            began = time.thread_time()
            await asyncio.sleep(0)
            assert time.thread_time() - began < 0.02
            turns += 1
        assert turns > 50

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "pieces", [[], [b"a"], [b"a", b"", memoryview(b"bc")], [b"x" * 300_000] * 5]
)
def test_pieces_are_joined(pieces):
    assert result_of(joined(pieces)) == b"".join(pieces)


def test_large_pieces_are_joined_in_short_steps():
    def longest_step():
        steps, longest = joined([b"x" * (1 << 18)] * 200), 0.0
        with contextlib.suppress(StopIteration):
            while True:
                began = time.thread_time()
                next(steps)
                longest = max(longest, time.thread_time() - began)
        return longest

    assert min(longest_step() for _ in range(3)) < 0.02  # a busy machine takes longer for some
