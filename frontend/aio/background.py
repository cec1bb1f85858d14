"""Background tasks that end with their owner, and daemon threads.

Unlike in an `asyncio.TaskGroup`, the other tasks continue when one fails. Each purpose has its
threads, in limited number: if they all hang, threads of other purposes continue. The interpreter
does not wait for daemon threads at its end. `asyncio.to_thread` and `concurrent.futures` offer
neither.
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
# For which a cancelled call waits for its thread.
_CANCELLED_SECONDS = 5.0


def _log(error: Exception) -> None:
    logger.error("A background task failed: %s", error, exc_info=error)


def _report(on_failure: Callable[[Exception], None], task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and isinstance(error := task.exception(), Exception):
        on_failure(error)


def _retrieve(outcome: "asyncio.Future[Any]") -> None:
    if not outcome.cancelled():
        outcome.exception()  # asyncio logs it otherwise


class BackgroundTasks:
    """Tasks that are cancelled and awaited when the ``async with`` block ends."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cancel(self) -> None:
        """Cancel all running tasks."""
        for task in self._tasks:
            task.cancel()

    def start(
        self, work: Coroutine[Any, Any, T], on_failure: Callable[[Exception], None] = _log
    ) -> "asyncio.Future[T]":
        """Run a coroutine to its end, even if its outcome is cancelled.

        The outcome that is returned is cancelled when the block ends first.

        Raises:
            ServerStopping: The block has ended.
        """
        if self._is_over:
            work.close()
            raise ServerStopping
        task = self._add(work)
        task.add_done_callback(partial(_report, on_failure))
        outcome = asyncio.shield(task)
        outcome.add_done_callback(_retrieve)
        return outcome

    def keep_running(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``work()``, and again after each exception; ``name`` is for the log."""
        self._add(_keep_running(name, work))

    def _add(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        task = asyncio.create_task(work)
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
            # A failure during a cancellation must not end the cancellation.
            if task is not None and task.cancelling():
                logger.exception("%s failed at its end.", name)
                return
            has_recovered = loop.time() - began > _LONGEST_PAUSE_SECONDS
            doubled = 0.0 if has_recovered else min(2 * pause, _LONGEST_PAUSE_SECONDS)
            pause = doubled or _FIRST_PAUSE_SECONDS
            logger.exception("%s failed; it restarts in %g s.", name, pause)
        await asyncio.sleep(pause)


async def outcome_of(outcome: "asyncio.Future[T]") -> T:
    """Wait for an outcome; raises ServerStopping if the end of its block cancelled it."""
    try:
        return await outcome
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ServerStopping from None


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, object]) -> bool:
    """Await a coroutine in this task, but cancel it when an event is set; return if it ended."""
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
    """Limits something to ``count`` at once; up to ``max_waiting`` more wait for a slot.

    ``under_way`` is for the refusal, as in "archives are being downloaded (max_downloads)".
    """

    def __init__(self, count: int, under_way: str, max_waiting: int = 100) -> None:
        self._free = asyncio.Semaphore(count)
        self._waiting = 0
        self._max_waiting = max_waiting
        self._refusal = f"{count} {under_way} and {max_waiting} more wait; try again later."

    @contextlib.asynccontextmanager
    async def taken(self) -> AsyncIterator[None]:
        """Hold a slot within the block; the caller has a deadline for the wait.

        Raises:
            ServerBusy: Too many wait.
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
    """Up to ``count`` threads for one purpose, with a queue of up to ``max_waiting`` calls."""

    def __init__(self, purpose: str, count: int, max_waiting: int = 100) -> None:
        self._purpose = purpose
        self._count = count
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0  # threads that wait for a call, minus calls that wait for a thread

    def submit(self, function: Callable[..., T], *arguments: Any) -> concurrent.futures.Future[T]:
        """Call a function in a thread; return its outcome, which can be cancelled until it begins.

        Raises:
            ServerBusy: Too many calls wait for a thread.
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
        """Call a function in a thread and wait for it; raises ServerBusy.

        A cancellation first waits some seconds for the end of the call: cleaning up during the call
        would be a race.
        """
        running = asyncio.wrap_future(self.submit(function, *arguments))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running}, timeout=_CANCELLED_SECONDS)
            raise

    def _run(self, call: Callable[[], None]) -> None:
        while True:  # no deadline: a daemon thread ends with the process
            call()
            with self._lock:
                self._idle += 1
            call = self._calls.get()


async def in_abandonable_thread(
    function: Callable[..., T],
    *arguments: Any,
    discard: Callable[[T], object] = lambda _: None,
) -> T:
    """Call a function that may hang in a new daemon thread.

    After a cancellation ``discard`` is called with its result.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    call = partial(_call_into, outcome, function, *arguments)
    threading.Thread(target=call, name=function.__name__, daemon=True).start()
    try:
        return await asyncio.wrap_future(outcome)
    except asyncio.CancelledError:
        outcome.add_done_callback(partial(_discard, discard))
        raise


def _discard(discard: Callable[[T], object], outcome: concurrent.futures.Future[T]) -> None:
    if not outcome.cancelled() and outcome.exception() is None:
        discard(outcome.result())


def _call_into(
    outcome: concurrent.futures.Future[T], function: Callable[..., T], *arguments: Any
) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        result = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - it is the outcome
        outcome.set_exception(error)
    else:
        outcome.set_result(result)
