"""The sequences that a stream uses, and which of them end with it."""

import asyncio

import pytest

from marserve.frontend.grpc.request_streams import StreamSequences


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


def test_a_stream_that_is_broken_off_leaves_the_sequences_that_are_open() -> None:
    model = Model()
    model.open = {"open", "others"}
    requests = [(model, each) for each in ("open", "ended", "open", None)]
    with pytest.raises(BrokenOff):
        asyncio.run(answer(requests, is_broken_off=True))
    assert model.left == ["open"]


def test_a_stream_that_ends_leaves_its_sequences_open() -> None:
    model = Model()
    model.open = {"open"}
    asyncio.run(answer([(model, "open")], is_broken_off=False))
    assert model.left == []


def test_a_stream_that_is_cancelled_just_after_the_end_of_its_requests_is_broken_off() -> None:
    """grpc may report the end of the requests before the cancellation."""
    model = Model()
    model.open = {"open"}

    async def answer_and_cancel() -> None:
        call = asyncio.create_task(answer([(model, "open")], is_broken_off=False))
        await asyncio.sleep(0)
        assert not call.done()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(answer_and_cancel())
    assert model.left == ["open"]


def test_a_stream_that_lasts_for_days_does_not_remember_all_that_was_in_it() -> None:
    model = Model()

    def requests():
        for number in range(10_000):
            model.open.add(f"{number}")
            model.open.discard(f"{number - 100}")  # idle
            yield model, f"{number}"

    with pytest.raises(BrokenOff):
        asyncio.run(answer(requests(), is_broken_off=True))
    assert set(model.left) >= model.open
