"""Tasks beside the work: they fail without harm, and end with their owner."""

import asyncio
import inspect
import threading

import pytest

from marserve.frontend.aio import background
from marserve.frontend.aio.background import (
    BackgroundTasks,
    DaemonThreads,
    Slots,
    in_abandonable_thread,
    unless,
)
from marserve.frontend.errors import ServerBusy, ServerStopping


async def fail() -> None:
    raise ValueError("it failed")


def test_a_task_that_fails_does_not_end_its_neighbours():
    async def work():
        async with BackgroundTasks() as tasks:
            failing = tasks.start(fail())
            going_on = tasks.start(asyncio.sleep(0.01, "well"))
            with pytest.raises(ValueError, match="it failed"):
                await failing
            return await going_on

    assert asyncio.run(work()) == "well"


def test_a_failure_that_nobody_waits_for_is_logged(caplog):
    async def work():
        async with BackgroundTasks() as tasks:
            tasks.start(fail()).cancel()
            await asyncio.sleep(0)

    asyncio.run(work())
    assert "A background task failed: it failed" in caplog.text


def test_a_task_goes_on_when_nobody_waits_any_more():
    async def work():
        done = asyncio.Event()

        async def note():
            await asyncio.sleep(0)
            done.set()

        async with BackgroundTasks() as tasks:
            tasks.start(note()).cancel()
            await asyncio.wait_for(done.wait(), 5)
            return done.is_set()

    assert asyncio.run(work())


def test_tasks_end_with_the_block_also_those_that_have_not_begun():
    async def work():
        async with BackgroundTasks() as tasks:
            running = tasks.start(asyncio.sleep(60))
            await asyncio.sleep(0)
            waiting = tasks.start(asyncio.sleep(60))
        return [running.cancelled(), waiting.cancelled()]

    assert asyncio.run(work()) == [True, True]


def test_after_the_block_nothing_is_begun():
    async def work():
        async with BackgroundTasks() as tasks:
            pass
        late = fail()
        with pytest.raises(ServerStopping):
            tasks.start(late)
        return inspect.getcoroutinestate(late)

    assert asyncio.run(work()) == inspect.CORO_CLOSED


def test_an_error_of_the_block_comes_out_as_it_is():
    async def work():
        async with BackgroundTasks() as tasks:
            tasks.start(asyncio.sleep(60))
            raise ValueError("of the block")

    with pytest.raises(ValueError, match="of the block"):
        asyncio.run(work())


def test_what_keeps_running_is_logged_and_started_again(run, caplog):
    async def work():
        starts = 0

        async def fail_twice():
            nonlocal starts
            starts += 1
            if starts < 3:
                raise ValueError(f"failure {starts}")
            await asyncio.sleep(3600)

        async with BackgroundTasks() as tasks:
            tasks.keep_running("The probe", fail_twice)
            await asyncio.sleep(10)
        return starts

    assert run(work()) == 3
    assert "The probe failed; it restarts in 1 s." in caplog.text
    assert "The probe failed; it restarts in 2 s." in caplog.text
    assert "failure 2" in caplog.text


def test_what_fails_at_its_end_does_not_go_on(run, caplog):
    async def fail_when_cancelled():
        try:
            await asyncio.sleep(3600)
        finally:
            raise ValueError("while it ended")

    async def work():
        async with BackgroundTasks() as tasks:
            tasks.keep_running("The log", fail_when_cancelled)
            await asyncio.sleep(1)

    run(work())
    assert "The log failed at its end." in caplog.text


@pytest.mark.parametrize("is_early", [True, False])
def test_an_event_ends_what_is_done_unless_it_comes(is_early):
    async def work():
        event = asyncio.Event()
        if is_early:
            asyncio.get_running_loop().call_soon(event.set)
        return await unless(event, asyncio.sleep(60 if is_early else 0))

    assert asyncio.run(work()) is not is_early


def test_a_failure_comes_out_of_what_is_done_unless():
    with pytest.raises(ValueError, match="it failed"):
        asyncio.run(unless(asyncio.Event(), fail()))


def test_a_cancellation_waits_for_the_thread():
    go_on, ended = threading.Event(), threading.Event()

    def hold():
        go_on.wait(5)
        ended.set()

    async def work():
        waiting = asyncio.ensure_future(DaemonThreads("disk", 1).run(hold))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.is_set()

    asyncio.run(work())


def test_nobody_waits_for_an_abandoned_thread():
    go_on = threading.Event()

    async def work():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(in_abandonable_thread(go_on.wait), 0.01)
        with pytest.raises(ZeroDivisionError):
            await in_abandonable_thread(divmod, 1, 0)
        return await in_abandonable_thread(str, 7)

    assert asyncio.run(work()) == "7"
    go_on.set()


def test_a_cancellation_leaves_a_thread_that_hangs_behind(monkeypatch):
    monkeypatch.setattr(background, "_CANCELLED_SECONDS", 0.01)
    go_on = threading.Event()

    async def work():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await DaemonThreads("hung", 1).run(go_on.wait)

    asyncio.run(work())
    go_on.set()


def test_threads_that_all_hang_leave_those_of_another_purpose_alone():
    go_on = threading.Event()
    hung, other = DaemonThreads("hung", 2, max_waiting=2), DaemonThreads("other", 1)

    async def work():
        for _ in range(4):
            hung.submit(go_on.wait)
        with pytest.raises(ServerBusy, match=r"^hung: 2 calls wait for a thread\.$"):
            hung.submit(go_on.wait)
        return await other.run(str, 7)

    assert asyncio.run(work()) == "7"
    go_on.set()


def test_calls_of_one_thread_run_in_order_and_their_failures_come_out():
    done = []
    thread = DaemonThreads("order", 1)

    async def work():
        async with asyncio.TaskGroup() as group:
            for number in range(10):
                group.create_task(thread.run(done.append, number))
        with pytest.raises(ZeroDivisionError):
            await thread.run(divmod, 1, 0)
        with pytest.raises(KeyboardInterrupt):
            await thread.run(_interrupt)

    asyncio.run(work())
    assert done == list(range(10))


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_slots_make_some_wait_and_refuse_the_rest(run):
    slots = Slots(2, "archives are on their way", max_waiting=3)
    held = []
    refused = []

    async def hold(number):
        try:
            async with slots.taken():
                held.append(number)
                await asyncio.sleep(1)
        except ServerBusy as error:
            refused.append(str(error))

    async def work():
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(hold(-1))
            await asyncio.sleep(0)
            for number in range(5):
                group.create_task(hold(number))
            await asyncio.sleep(0.5)
            assert held == [-1, 0]
            leaving.cancel()

    run(work())
    assert held == [-1, 0, 1, 2, 3]
    assert refused == ["2 archives are on their way and 3 more wait; try again later."]
