"""Background work: tasks that end with their owner, and threads that are awaited or abandoned.

A failure is logged. It ends neither the other tasks nor fails the owner's end, as it would in a
bare `asyncio.TaskGroup`.
"""

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


def _log(error: Exception) -> None:
    logger.error("A background task failed: %s", error, exc_info=error)


class BackgroundTasks:
    """Tasks that are cancelled, and waited for, where the ``async with`` block ends."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        # Without the block's exception, which the group would wrap into another.
        self.cancel()
        await self._group.__aexit__(None, None, None)

    def cancel(self) -> None:
        """Cancel all running tasks."""
        for task in self._tasks:
            task.cancel()

    def start(
        self, work: Coroutine[Any, Any, T], on_failure: Callable[[Exception], None] = _log
    ) -> "asyncio.Future[T]":
        """Run something to its end, even if nobody waits for it any more.

        Returns its outcome, which is cancelled when the block ends first; to cancel the outcome
        does not end the work. ``on_failure`` gets the exception that the outcome has, too.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        async def run() -> None:
            try:
                result = await work
            except Exception as error:  # noqa: BLE001 - passed on to whoever waits
                on_failure(error)
                if not outcome.done():
                    outcome.set_exception(error)
                    outcome.exception()  # so that asyncio does not complain where nobody asks
            else:
                if not outcome.done():
                    outcome.set_result(result)

        def end(_: "asyncio.Task[None]") -> None:
            work.close()  # where it was cancelled before it began
            outcome.cancel()

        self._add(run()).add_done_callback(end)
        return outcome

    def keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run what ``work`` returns, and after an exception again; the log calls it ``name``."""
        self._add(_keep_running(name, work))

    def _add(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _keep_running(name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    task, loop, pause = asyncio.current_task(), asyncio.get_running_loop(), 0.0
    while True:
        began = loop.time()
        try:
            await work()
            return
        except Exception:
            # It may also fail while it is being cancelled, which then must not be forgotten.
            if task is not None and task.cancelling():
                logger.exception("%s failed at its end.", name)
                return
            has_recovered = loop.time() - began > _LONGEST_PAUSE_SECONDS
            doubled = 0.0 if has_recovered else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            pause = doubled or _FIRST_PAUSE_SECONDS
            logger.exception("%s failed; it goes on in %g s.", name, pause)
        await asyncio.sleep(pause)


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Do something in the present task, but cancel it when an event comes first.

    Returns whether it was done.
    """
    loop = asyncio.get_running_loop()

    async def end() -> None:
        await event.wait()
        limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            ending = loop.create_task(end())
            try:
                await work
            finally:
                ending.cancel()
                await asyncio.wait({ending})
    except TimeoutError:
        if not limit.expired():
            raise
        return False
    return True


async def to_thread_and_back(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread; a cancellation comes into force when it has ended.

    A thread cannot be cancelled, and cleaning up while it still runs would be a race.
    """
    running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


async def in_abandonable_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that may hang for ever in a thread that neither we nor our end wait for."""
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not outcome.set_running_or_notify_cancel():
            return
        try:
            result = function(*arguments)
        except Exception as error:  # noqa: BLE001 - passed on to whoever waits
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=function.__name__, daemon=True).start()
    return await asyncio.wrap_future(outcome)


async def start_in_thread(
    start: Callable[..., T], *arguments: Any, discard: Callable[[T], object]
) -> T:
    """Start something in a thread, as `in_abandonable_thread` does.

    ``discard`` gets what was started when nobody waits for it any more.
    """
    starting = asyncio.ensure_future(in_abandonable_thread(start, *arguments))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(lambda _: _discard(starting, discard))
        raise


def _discard(starting: "asyncio.Future[T]", discard: Callable[[T], object]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        discard(starting.result())
