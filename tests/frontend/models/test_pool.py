import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marserve.backend.protocol import Reply
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.jobs import JobQueue
from marserve.frontend.batching.policies import FixedWindow
from marserve.frontend.config import Config
from marserve.frontend.models.pool import ServedModel, WorkerHost, WorkerPool
from marserve.frontend.models.settings import Requested, settle
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.devices import DeviceAllocator


class Pool(WorkerPool):
    """A pool over fake workers, with what a test wants to look at."""

    launcher: Any
    devices: DeviceAllocator
    last_gone: int


@pytest.fixture
def make_pool(fakes: ModuleType, config: Config, tmp_path: Path) -> Callable[..., Any]:
    @asynccontextmanager
    async def make(*lives: Any, gpus: int = 0, **changes: Any) -> AsyncIterator[Pool]:
        loop = asyncio.get_running_loop()
        settings = settle(Requested(), {}, {}, config, gpus=gpus, default_workers=1)
        launcher, devices = fakes.FakeLauncher(*lives), DeviceAllocator(gpus)

        def on_last_gone() -> None:
            pool.last_gone += 1

        pool = Pool(
            ServedModel("m", "1.0", tmp_path, "h", replace(settings, **changes)),
            WorkerHost(config, launcher, devices),
            Batcher(JobQueue(9), FixedWindow(1, 0.0), loop, loop.time),
            Metrics("host").for_model("m", "1.0"),
            on_last_gone,
        )
        pool.launcher, pool.devices, pool.last_gone = launcher, devices, 0
        try:
            yield pool
        finally:
            await pool.close(0)
            await fakes.settled()

    return make


def test_workers_are_started_to_the_minimum_and_taken_out_above_the_maximum(
    run: Callable[..., Any], make_pool: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with make_pool() as pool:
            started, retired = pool.resize(3, 5)
            assert (len(started), retired, len(pool)) == (3, [], 3)
            assert all([await worker.first_outcome() is None for worker in started])
            assert (pool.ready, pool.alive) == (3, 3)
            assert [worker.worker_id for worker in pool] == [9000, 9001, 9002]
            assert pool.resize(1, 3) == ([], [])
            _, retired = pool.resize(0, 1)
            assert retired == [started[2], started[1]]
            await pool.retire(retired, 0)
            assert (len(pool), pool.alive, pool.last_gone) == (1, 1, 0)
            again, _ = pool.resize(2, 2)
            assert [worker.worker_id for worker in again] == [9003]

    run(scenario())


def test_the_end_of_the_last_worker_is_told_once(
    run: Callable[..., Any], fakes: ModuleType, make_pool: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        async with make_pool() as pool:
            started, _ = pool.resize(2, 2)
            for worker in started:
                await worker.first_outcome()
            await pool.close(0)
            await fakes.settled()
            assert (len(pool), pool.alive, pool.last_gone) == (0, 0, 1)

    run(scenario())


def test_a_pool_is_healthy_with_as_many_healthy_workers_as_its_minimum(
    run: Callable[..., Any], fakes: ModuleType, make_pool: Callable[..., Any]
) -> None:
    async def scenario() -> None:
        lives = [fakes.Life(), fakes.Life(load=Reply(500, "no"))]
        async with make_pool(*lives, max_retry_timeout=0) as pool:
            assert pool.is_healthy
            started, _ = pool.resize(2, 2)
            outcomes = [await worker.first_outcome() for worker in started]
            await fakes.settled()
            assert [outcome is None for outcome in outcomes] == [True, False]
            assert (pool.is_healthy, pool.ready, pool.alive) == (False, 1, 1)
            pool.resize(1, 2)
            assert pool.is_healthy

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "gpus"),
    [
        ({}, [0, 1, 0]),
        ({"device_ids": (1,)}, [1, 1, 1]),
        ({"use_gpu": False}, [None, None, None]),
    ],
)
def test_gpus_are_dealt_out_and_given_back(
    changes: dict[str, Any],
    gpus: list[int | None],
    run: Callable[..., Any],
    make_pool: Callable[..., Any],
) -> None:
    async def scenario() -> None:
        async with make_pool(gpus=2, **changes) as pool:
            started, _ = pool.resize(3, 3)
            assert [worker.gpu_id for worker in started] == gpus
            for worker in started:
                await worker.first_outcome()
            loads = [worker.loaded[0].gpu_id for worker in pool.launcher.workers]
            assert loads == gpus
            await pool.close(0)
            assert [pool.devices.acquire() for _ in range(2)] == [0, 1]

    run(scenario())


# -- what all workers share ------------------------------------------------------------------------


def host(config: Config, fakes: ModuleType) -> WorkerHost:
    return WorkerHost(config, fakes.FakeLauncher(), DeviceAllocator(0))


def test_the_environment_is_the_servers_less_what_is_withheld(
    config: Config, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET", "s")
    monkeypatch.setenv("MY_AWS_SECRET", "t")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    withheld = replace(config, blacklist_env_vars=re.compile("AWS_.*"), decode_input_request=False)
    environment = host(withheld, fakes).environment(["/model"])
    assert "AWS_SECRET" not in environment
    assert environment["MY_AWS_SECRET"] == "t"
    assert environment["PATH"] == os.environ["PATH"]
    assert environment["TS_DECODE_INPUT_REQUEST"] == "false"
    assert environment["PYTHONPATH"] == "/mine:/model"


def test_threads_are_shared_out_unless_somebody_has_decided(
    config: Config, fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one = host(config, fakes)
    one.cores = 8
    assert [one.threads(workers) for workers in (0, 1, 3, 100)] == [8, 8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert one.threads(1) == 0
