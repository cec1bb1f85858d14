"""Requests of a stream: side by side, in order, bounded, and ended together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from marserve.frontend.grpc.messages import Answers
from marserve.frontend.grpc.request_streams import RequestStream, StreamSequences


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


def test_requests_are_begun_in_order_and_answered_as_they_are_done():
    async def main():
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


def test_no_more_than_allowed_are_under_way_until_their_answers_are_taken():
    async def main():
        answering = Answering()
        for number in range(10):
            answering.let(number)
        async with aclosing(RequestStream(answering, numbers(10), 2).answers()) as answers:
            assert await anext(answers) == 0
            await settle()
            assert len(answering.begun) <= 4  # two wait, one is ready, one was taken

    asyncio.run(main())


def test_whoever_leaves_ends_all_that_is_under_way():
    async def main():
        answering = Answering()
        async with aclosing(RequestStream(answering, numbers(3), 10).answers()) as answers:
            answering.let(0)
            assert await anext(answers) == 0
            await settle()
        assert sorted(answering.ended) == [0, 1, 2]
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_defect_is_raised_to_who_takes_the_answers(is_reading):
    async def requests():
        yield 0
        if is_reading:
            raise ValueError("broken")

    async def answer(number):
        if not is_reading:
            raise ValueError("broken")
        yield number

    async def main():
        with pytest.raises(ValueError, match="broken"):
            async for _ in RequestStream(answer, requests(), 10).answers():
                pass

    asyncio.run(main())


# -- the sequences that a stream uses, and which of them end with it -------------------------------


class Model:
    def __init__(self) -> None:
        self.open: set[str] = set()
        self.left: list[str] = []

    def has_sequence(self, sequence_id: str) -> bool:
        return sequence_id in self.open

    def leave_sequence(self, sequence_id: str) -> None:
        self.left.append(sequence_id)


class BrokenOff(Exception):
    pass


async def answer(requests, *, is_broken_off: bool) -> None:
    """Answer the requests of a stream: models with ids of sequences."""
    async with StreamSequences() as used:
        for model, sequence_id in requests:
            used.add(model, sequence_id)
            assert len(used) <= 400
        if is_broken_off:
            raise BrokenOff


def test_a_stream_that_is_broken_off_leaves_the_sequences_that_are_open():
    model = Model()
    model.open = {"open", "others"}
    requests = [(model, each) for each in ("open", "ended", "open", None)]
    with pytest.raises(BrokenOff):
        asyncio.run(answer(requests, is_broken_off=True))
    assert model.left == ["open"]


def test_a_stream_that_ends_leaves_its_sequences_open():
    model = Model()
    model.open = {"open"}
    asyncio.run(answer([(model, "open")], is_broken_off=False))
    assert model.left == []


def test_a_stream_that_is_cancelled_just_after_the_end_of_its_requests_is_broken_off():
    """grpc may report the end of the requests before the cancellation."""
    model = Model()
    model.open = {"open"}

    async def answer_and_cancel():
        call = asyncio.create_task(answer([(model, "open")], is_broken_off=False))
        await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(answer_and_cancel())
    assert model.left == ["open"]


def test_a_stream_that_lasts_for_days_does_not_remember_all_that_was_in_it():
    model = Model()

    def requests():
        for number in range(10_000):
            model.open.add(f"{number}")
            model.open.discard(f"{number - 100}")  # idle
            yield model, f"{number}"

    with pytest.raises(BrokenOff):
        asyncio.run(answer(requests(), is_broken_off=True))
    assert set(model.left) >= model.open
