"""First messages of calls: how many are read at a time, for how long, and which end for others."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import pytest
from fakes import drain_loop

from marserve.frontend.errors import ServeError
from marserve.frontend.grpc.message_reads import MessageReads

Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Context:
    """A call; its message is complete when it is sent."""

    def __init__(self) -> None:
        self._message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def send(self, message: Any) -> None:
        self._message.set_result(message)

    async def read(self) -> Any:
        return await self._message


class Calls:
    """Begins calls whose messages are read with the same limits."""

    def __init__(self, slots: int) -> None:
        self._reads = MessageReads(slots, max_bytes=100, undisturbed=5.0, timeout=60.0)

    def begin(self) -> tuple[Context, "asyncio.Task[bytes | None]"]:
        context = Context()
        return context, asyncio.ensure_future(self._reads.first(context))


def test_a_message_is_returned_and_its_end_is_none(run: Run) -> None:
    async def main() -> None:
        calls = Calls(slots=1)
        for sent, expected in ((b"x", b"x"), (b"", b""), (grpc.aio.EOF, None)):
            context, reading = calls.begin()
            context.send(sent)
            assert await reading == expected

    run(main())


def test_a_message_is_too_long(run: Run) -> None:
    async def main() -> None:
        context, reading = Calls(slots=1).begin()
        context.send(b"x" * 101)
        with pytest.raises(ServeError, match="more than 100 bytes"):
            await reading

    run(main())


def test_a_message_that_does_not_come_ends_after_its_time(run: Run) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        _, reading = Calls(slots=1).begin()
        with pytest.raises(ServeError, match="within 60 s"):
            await reading
        assert 60 <= loop.time() - began <= 61.5

    run(main())


def test_a_call_that_needs_a_slot_ends_a_read_that_has_lasted_long(run: Run) -> None:
    async def main() -> None:
        loop, calls = asyncio.get_running_loop(), Calls(slots=1)
        began = loop.time()
        _, slow = calls.begin()
        await drain_loop()
        context, waiting = calls.begin()
        context.send(b"x")
        with pytest.raises(ServeError, match="Other calls need the memory"):
            await slow
        assert 5 <= loop.time() - began <= 6.5
        assert await waiting == b"x"

    run(main())


def test_calls_that_came_first_do_not_keep_out_one_whose_message_is_there(run: Run) -> None:
    async def main() -> None:
        calls = Calls(slots=1)
        first, reading = calls.begin()
        silent = [calls.begin()[1] for _ in range(100)]
        context, last = calls.begin()
        context.send(b"last")
        await drain_loop()
        first.send(b"first")
        assert (await reading, await last) == (b"first", b"last")
        for each in silent:
            each.cancel()
        await asyncio.gather(*silent, return_exceptions=True)

    run(main())


@pytest.mark.parametrize("has_slot", [True, False])
def test_a_client_that_leaves_leaves_its_slot_to_others(has_slot: bool, run: Run) -> None:
    async def main() -> None:
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
