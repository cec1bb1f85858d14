import asyncio
import threading
import time

import pytest

from marserve.frontend.telemetry import gpu
from marserve.frontend.telemetry.gpu import (
    Gpu,
    GpuReader,
    count_gpus,
    count_gpus_in_time,
    read_gpus,
)


def test_each_gpu_has_its_figures(driver):
    driver.gpus = [(37, 12, 1024, 4096), (0, 0, 0, 4096)]
    first, second = read_gpus()
    assert first == Gpu(37, 12, 1024, 4096)
    assert (first.memory_utilization, second.memory_utilization) == (25.0, 0.0)
    assert not driver.sessions


def test_a_share_of_a_gpu_has_no_utilization(driver):
    driver.gpus = [(None, None, 512, 1024)]
    assert read_gpus() == [Gpu(None, None, 512, 1024)]


def test_a_gpu_without_any_figures(driver):
    driver.gpus = [(None, None, None, None)]
    assert read_gpus() == [Gpu(None, None, None, None)]
    assert read_gpus()[0].memory_utilization is None


def test_an_old_driver_is_asked_in_its_way(driver):
    driver.gpus, driver.is_old = [(1, 2, 3, 4)], True
    assert read_gpus() == [Gpu(1, 2, 3, 4)]


def test_without_a_driver_there_is_no_gpu(driver):
    driver.gpus, driver.is_loaded = [(1, 2, 3, 4)], False
    assert (read_gpus(), count_gpus({})) == ([], 0)


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 2),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
    ],
)
def test_gpus_are_counted_as_cuda_would_show_them(driver, environment, count):
    driver.gpus = [(0, 0, 0, 1)] * 2
    assert count_gpus(environment) == count


def test_a_start_does_not_wait_for_a_driver_that_hangs(driver, monkeypatch, caplog):
    monkeypatch.setattr(gpu, "_START_SECONDS", 0.01)
    driver.gpus = [(0, 0, 0, 1)]
    with driver.hanging():
        assert asyncio.run(count_gpus_in_time()) == 0
    assert "does not answer" in caplog.text


def test_each_description_waited_for_a_hung_driver_and_left_a_thread(driver, monkeypatch, caplog):
    monkeypatch.setattr(gpu, "_READ_SECONDS", 0.05)

    async def scenario():
        reader = GpuReader()
        before = threading.active_count()
        with driver.hanging():
            assert await asyncio.gather(*[reader.read() for _ in range(20)]) == [()] * 20
            for _ in range(100):
                assert await reader.read() == ()
            assert threading.active_count() <= before + 1
        async with asyncio.timeout(10):
            while not await reader.read():  # from now on it answers again
                await asyncio.to_thread(time.sleep, 0.001)

    driver.gpus = [(1, 2, 3, 4)]
    asyncio.run(scenario())
    assert caplog.text.count("does not answer") == 1


def test_who_asks_within_a_second_gets_the_same_answer(driver, run):
    async def scenario():
        reader = GpuReader()
        driver.gpus = [(1, 2, 3, 4)]
        asked = await asyncio.gather(*[reader.read() for _ in range(5)])
        driver.gpus = [(5, 6, 7, 8)]
        await asyncio.sleep(0.5)
        assert [*asked, await reader.read()] == [[Gpu(1, 2, 3, 4)]] * 6
        await asyncio.sleep(1)
        assert await reader.read() == [Gpu(5, 6, 7, 8)]

    run(scenario())


def test_a_driver_that_fails_at_the_end_of_a_question_has_answered_it(driver):
    driver.gpus, driver.fails_at_end = [(1, 2, 3, 4)], True
    assert read_gpus() == [Gpu(1, 2, 3, 4)]
