"""Background work: tasks that end with their owner, and threads that are awaited or abandoned.

Each purpose has threads of its own, so many: where those of one all hang, as at a disk that does
not answer, the work of another goes on. They are daemon threads, which the interpreter's end does
not wait for; `asyncio.to_thread` and `concurrent.futures` offer neither.

A failure is logged. It ends neither the other tasks nor fails the owner's end, as it would in a
bare `asyncio.TaskGroup`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any, Self, TypeVar

from marserve.frontend.errors import ServerBusy, ServerStopping

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0
# How long work that was cancelled may go on in its thread before it is left behind.
_CANCELLED_SECONDS = 5.0


def _log(error: Exception) -> None:
    logger.error("A background task failed: %s", error, exc_info=error)


class BackgroundTasks:
    """Tasks that are cancelled, and waited for, where the ``async with`` block ends."""

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = False

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        # Without the block's exception, which the group would wrap into another.
        self._is_over = True
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

        Raises:
            ServerStopping: The block has ended.
        """
        if self._is_over:
            work.close()
            raise ServerStopping
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


async def outcome_of(outcome: "asyncio.Future[T]") -> T:
    """Wait for a change; raises ServerStopping where the stop of the server cancelled it."""
    try:
        return await outcome
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ServerStopping from None  # the change was cancelled by the stop, not by the caller


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


class Slots:
    """At most ``count`` of something at once; so many more wait in line, the rest is refused.

    ``under_way`` says what, as in "archives are being downloaded (max_downloads)".
    """

    def __init__(self, count: int, under_way: str, max_waiting: int = 100) -> None:
        self._free = asyncio.Semaphore(count)
        self._waiting = 0
        self._max_waiting = max_waiting
        self._refusal = f"{count} {under_way} and {max_waiting} more wait; try again later."

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold one within the block, once there is one; the caller has a deadline for that.

        Raises:
            ServerBusy: The line is full.
        """
        if self._free.locked() and self._waiting >= self._max_waiting:
            raise ServerBusy(self._refusal)
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._free.release()


class DaemonThreads:
    """Threads for one purpose: up to ``count``, and up to ``max_waiting`` calls that wait for one.

    Calls begin in the order of their coming.
    """

    def __init__(self, purpose: str, count: int, max_waiting: int = 100) -> None:
        self._purpose = purpose
        self._count = count
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0  # threads that wait for a call, less the calls that wait for them

    def submit(self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Have a function called; returns its outcome, which may be cancelled until it begins.

        Raises:
            ServerBusy: Too many calls wait.
        """
        outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        call = partial(_call_into, outcome, function, *arguments)
        with self._lock:
            if self._idle <= 0 and self._started < self._count:
                thread = threading.Thread(target=self._run, args=(call,), name=self._purpose)
                thread.daemon = True
                thread.start()
                self._started += 1
            elif self._idle > -self._max_waiting:
                self._idle -= 1
                self._calls.put(call)
            else:
                raise ServerBusy(f"{self._purpose}: {self._max_waiting} calls wait for a thread.")
        return outcome

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function; a cancellation comes into force when it has ended, or hangs.

        A thread cannot be cancelled, and cleaning up while it still runs would be a race.

        Raises:
            ServerBusy: Too many calls wait.
        """
        running = asyncio.wrap_future(self.submit(function, *arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running}, timeout=_CANCELLED_SECONDS)
            raise

    def _run(self, call: Callable[[], None]) -> None:
        while True:  # no deadline: it is a thread for this, and ends with the process
            call()
            with self._lock:
                self._idle += 1
            call = self._calls.get()


async def in_abandonable_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run a function that may hang for ever in a thread that neither we nor our end wait for."""
    return await asyncio.wrap_future(_in_thread(function, *arguments))


async def start_in_thread(
    start: Callable[..., T], *arguments: Any, discard: Callable[[T], object]
) -> T:
    """Start something in a thread, as `in_abandonable_thread` does.

    ``discard`` gets what was started when nobody waits for it any more.
    """
    outcome = _in_thread(start, *arguments)
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        outcome.add_done_callback(partial(_discard, discard))
        raise


def _discard(discard: Callable[[T], object], outcome: concurrent.futures.Future[T]) -> None:
    if not outcome.cancelled() and outcome.exception() is None:
        discard(outcome.result())


def _in_thread(function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    call = partial(_call_into, outcome, function, *arguments)
    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    return outcome


def _call_into(
    outcome: concurrent.futures.Future[T], function: Callable[..., T], *arguments: Any
) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - passed on to whoever waits
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
