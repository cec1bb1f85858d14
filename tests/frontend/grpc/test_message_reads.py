"""First messages of calls: how many are read at a time, for how long, and which end for others."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from fakes import drain_loop

from marserve.frontend.errors import ServeError
from marserve.frontend.grpc.message_reads import MessageReads


class Context:
    """A call; its message is complete when it is sent, and its read ends when the call fails."""

    def __init__(self) -> None:
        self.failure = ""
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def send(self, message: Any) -> None:
        self._message.set_result(message)

    async def read(self) -> Any:
        return await self._message

    async def fail(self, error: ServeError) -> None:
        self.failure = error.message
        if not self._message.done():
            self._message.set_exception(grpc.aio.AbortError())
        raise grpc.aio.AbortError


class Calls:
    """Begins calls whose messages are read with the same limits."""

    def __init__(self, slots: int, undisturbed: float = 5.0) -> None:
        self._reads = MessageReads(slots, 100, undisturbed, timeout=60.0)

    def begin(self, client: str = "") -> tuple[Context, "asyncio.Task[bytes | None]"]:
        context = Context()
        return context, asyncio.ensure_future(self._reads.first(context, client, context.fail))


def test_a_message_is_returned_and_its_end_is_none(run):
    async def main():
        calls = Calls(slots=1)
        for sent, expected in ((b"x", b"x"), (b"", b""), (grpc.aio.EOF, None)):
            context, reading = calls.begin()
            context.send(sent)
            assert await reading == expected

    run(main())


def test_a_message_is_too_long(run):
    async def main():
        context, reading = Calls(slots=1).begin()
        context.send(b"x" * 101)
        with pytest.raises(ServeError, match="more than 100 bytes"):
            await reading

    run(main())


def test_a_message_that_does_not_come_ends_after_its_time(run):
    async def main():
        loop = asyncio.get_running_loop()
        began = loop.time()
        context, reading = Calls(slots=1).begin()
        with pytest.raises(grpc.aio.AbortError):
            await reading
        assert context.failure == "No message arrived within 60 s."
        assert 60 <= loop.time() - began <= 61.5

    run(main())


def test_a_call_that_gets_no_slot_ends_after_its_time(run):
    async def main():
        calls = Calls(slots=1, undisturbed=90.0)
        _, reading = calls.begin()
        _, waiting = calls.begin()
        with pytest.raises(ServeError, match="within 60 s"):
            await waiting
        with pytest.raises(grpc.aio.AbortError):
            await reading
        context, another = calls.begin()
        context.send(b"x")
        assert await another == b"x"

    run(main())


def test_a_call_that_needs_a_slot_ends_a_read_that_has_lasted_long(run):
    async def main():
        loop, calls = asyncio.get_running_loop(), Calls(slots=1)
        began = loop.time()
        slow, reading = calls.begin()
        await drain_loop()
        context, waiting = calls.begin()
        context.send(b"x")
        with pytest.raises(grpc.aio.AbortError):
            await reading
        assert slow.failure == "Other calls need the memory for this incomplete message."
        assert 5 <= loop.time() - began <= 6.5
        assert await waiting == b"x"

    run(main())


def test_a_message_that_comes_at_the_moment_of_its_end_is_answered(run):
    async def main():
        loop, calls = asyncio.get_running_loop(), Calls(slots=1, undisturbed=4.5)
        late, reading = calls.begin()
        await drain_loop()
        context, waiting = calls.begin()
        context.send(b"y")
        # In the same turn of the loop as the check after 5 s, and before it.
        loop.call_at(loop.time() + 5 - 1e-10, late.send, b"x")
        assert (await reading, await waiting) == (b"x", b"y")
        await drain_loop()
        assert late.failure == ""

    run(main())


def test_reads_of_the_client_that_has_most_end_first(run):
    async def main():
        calls = Calls(slots=3)
        slow, reading = calls.begin("one")
        many = [calls.begin("another") for _ in range(2)]
        await drain_loop()
        context, waiting = calls.begin("another")
        context.send(b"x")
        assert await waiting == b"x"
        assert [bool(each.failure) for each, _ in many] == [True, False]
        slow.send(b"slow")
        assert await reading == b"slow"
        await leave([task for _, task in many])

    run(main())


def test_a_slot_goes_to_the_client_that_has_fewest(run):
    async def main():
        calls = Calls(slots=2)
        many = [calls.begin("one")]
        held, reading = calls.begin("one")
        context, waiting = calls.begin("another")
        many += [calls.begin("one") for _ in range(100)]
        context.send(b"x")
        await drain_loop()
        held.send(b"y")
        assert (await reading, await waiting) == (b"y", b"x")
        await leave([task for _, task in many])

    run(main())


async def leave(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel calls, as the end of their connection does."""
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_calls_that_came_first_do_not_keep_out_one_whose_message_is_there(run):
    async def main():
        calls = Calls(slots=1)
        first, reading = calls.begin()
        silent = [calls.begin()[1] for _ in range(100)]
        context, last = calls.begin()
        context.send(b"last")
        await drain_loop()
        first.send(b"first")
        assert (await reading, await last) == (b"first", b"last")
        await leave(silent)

    run(main())


@pytest.mark.parametrize("has_slot", [True, False])
def test_a_client_that_leaves_leaves_its_slot_to_others(has_slot, run):
    async def main():
        calls = Calls(slots=1)
        readings = [calls.begin(), calls.begin()]
        await drain_loop()
        (_, leaving), (context, staying) = readings if has_slot else readings[::-1]
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        context.send(b"x")
        assert await staying == b"x"
        context, another = calls.begin()
        context.send(b"y")
        assert await another == b"y"

    run(main())
