import asyncio
import threading
from typing import Any

import pytest

from marserve.frontend.telemetry import gpu
from marserve.frontend.telemetry.gpu import Gpu, count_gpus, read_gpus, within_deadline


def test_each_gpu_has_its_figures(driver: Any) -> None:
    driver.gpus = [(37, 12, 1024, 4096), (0, 0, 0, 4096)]
    first, second = read_gpus()
    assert first == Gpu(37, 12, 1024, 4096)
    assert (first.memory_utilization, second.memory_utilization) == (25.0, 0.0)
    assert not driver.sessions


def test_a_share_of_a_gpu_has_no_utilization(driver: Any) -> None:
    driver.gpus = [(None, None, 512, 1024)]
    assert read_gpus() == [Gpu(None, None, 512, 1024)]


def test_a_gpu_without_any_figures(driver: Any) -> None:
    driver.gpus = [(None, None, None, None)]
    assert read_gpus() == [Gpu(None, None, None, None)]
    assert read_gpus()[0].memory_utilization is None


def test_an_old_driver_is_asked_in_its_way(driver: Any) -> None:
    driver.gpus, driver.is_old = [(1, 2, 3, 4)], True
    assert read_gpus() == [Gpu(1, 2, 3, 4)]


def test_without_a_driver_there_is_no_gpu(driver: Any) -> None:
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
def test_gpus_are_counted_as_cuda_would_show_them(
    driver: Any, environment: dict[str, str], count: int
) -> None:
    driver.gpus = [(0, 0, 0, 1)] * 2
    assert count_gpus(environment) == count


def test_nobody_waits_for_a_driver_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(gpu, "_DEADLINE_SECONDS", 0.01)
    assert asyncio.run(within_deadline(go_on.wait, otherwise=False)) is False
    assert "does not answer" in caplog.text
    go_on.set()
