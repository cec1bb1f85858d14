"""Requests of a stream: side by side, in order, bounded, and ended together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from marserve.frontend.grpc.messages import Answers
from marserve.frontend.grpc.request_streams import RequestStream

Test = Callable[[], Coroutine[Any, Any, None]]


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


class Answering:
    """Answers numbers, when it is let; notes what is under way."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.lets: dict[int, asyncio.Event] = {}

    def let(self, number: int) -> None:
        """Have one answered."""
        self.lets.setdefault(number, asyncio.Event()).set()

    async def __call__(self, number: int) -> Answers:
        self.begun.append(number)
        try:
            await self.lets.setdefault(number, asyncio.Event()).wait()
            yield number
        finally:
            self.ended.append(number)


async def settle() -> None:
    """Let everything happen that does not wait for anybody."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_requests_are_begun_in_order_and_answered_as_they_are_done() -> None:
    async def main() -> None:
        answering = Answering()
        answers = RequestStream(answering, numbers(3), 10).answers()
        first = asyncio.ensure_future(anext(answers))
        await settle()
        assert answering.begun == [0, 1, 2]
        for number in (2, 0, 1):
            answering.let(number)
            await settle()
        assert [await first, *[answer async for answer in answers]] == [2, 0, 1]

    asyncio.run(main())


def test_no_more_than_allowed_are_under_way_until_their_answers_are_taken() -> None:
    async def main() -> None:
        answering = Answering()
        for number in range(10):
            answering.let(number)
        async with aclosing(RequestStream(answering, numbers(10), 2).answers()) as answers:
            assert await anext(answers) == 0
            await settle()
            assert len(answering.begun) <= 4  # two wait, one is ready, one was taken

    asyncio.run(main())


def test_whoever_leaves_ends_all_that_is_under_way() -> None:
    async def main() -> None:
        answering = Answering()
        async with aclosing(RequestStream(answering, numbers(3), 10).answers()) as answers:
            answering.let(0)
            assert await anext(answers) == 0
            await settle()
        assert sorted(answering.ended) == [0, 1, 2]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_defect_is_raised_to_who_takes_the_answers(is_reading: bool) -> None:
    async def requests() -> AsyncIterator[int]:
        yield 0
        if is_reading:
            raise ValueError("broken")

    async def answer(number: int) -> Answers:
        if not is_reading:
            raise ValueError("broken")
        yield number

    async def main() -> None:
        with pytest.raises(ValueError, match="broken"):
            async for _ in RequestStream(answer, requests(), 10).answers():
                pass

    asyncio.run(main())
