import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import fakes
import pytest

from marserve.backend.manifest import Manifest
from marserve.backend.protocol import BatchCost, Loaded, LoadFailure, Profiled
from marserve.frontend.archives.archive import Archive
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.options import Batching
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_schema import TorchRun
from marserve.frontend.errors import NotEnoughDevices, WorkerDied
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.worker_pool import WorkerPool
from marserve.frontend.serving.worker_spec import ServedModel
from marserve.frontend.settings.model_settings import (
    ModelSettings,
    resolve_settings,
)
from marserve.frontend.settings.parallel import Parallel
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.devices import DeviceAllocator
from marserve.frontend.workers.supervisor import WorkerSupervisor


class Pool(WorkerPool):
    """A pool over fake workers, with what a test wants to look at."""

    launcher: Any
    devices: DeviceAllocator
    last_gone: int


@pytest.fixture
def make_pool(config, tmp_path):
    @asynccontextmanager
    async def make(*lives, gpus=0, cpu_launcher=False, **changes):
        loop = asyncio.get_running_loop()
        settings = resolve_settings({}, {}, {}, config, gpus=gpus, default_workers=1)
        manifest = Manifest(model_name="m", model_version="1.0", handler="h")
        launcher, devices = fakes.FakeLauncher(*lives), DeviceAllocator(gpus)

        def on_closed():
            pool.last_gone += 1

        pool = Pool(
            ServedModel(manifest, tmp_path, replace(settings, **changes)),
            WorkerHost(config, launcher, devices, cpu_launcher=cpu_launcher),
            Batcher(JobQueue(9), Batching(delay=0.0), loop, loop.time),
            ModelMetrics(Metrics("host"), "m", "1.0"),
            on_closed,
        )
        pool.launcher, pool.devices, pool.last_gone = launcher, devices, 0
        try:
            yield pool
        finally:
            await pool.close(0)
            await fakes.drain_loop()

    return make


@pytest.fixture
def serve_settings(config, tmp_path):
    """A model version without workers, and the launcher of those it will have."""

    @asynccontextmanager
    async def serve(settings, *lives):
        launcher = fakes.FakeLauncher(*lives)
        model = ModelVersion(
            Archive("m.mar", tmp_path, tmp_path / "root", tmp_path / "m.mar"),
            Manifest(model_name="m", model_version="1.0", handler="h", runtime="python"),
            settings,
            WorkerHost(config, launcher, DeviceAllocator(0)),
            Metrics("host"),
        )
        model.launcher = launcher
        try:
            yield model
        finally:
            await model.close(0)
            await fakes.drain_loop()

    return serve


def test_workers_are_started_to_the_minimum_and_taken_out_above_the_maximum(run, make_pool):
    async def scenario():
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


def test_the_end_of_the_last_worker_is_reported_once(run, make_pool):
    async def scenario():
        async with make_pool() as pool:
            started, _ = pool.resize(2, 2)
            for worker in started:
                await worker.first_outcome()
            await pool.close(0)
            await fakes.drain_loop()
            assert (len(pool), pool.alive, pool.last_gone) == (0, 0, 1)

    run(scenario())


def test_a_pool_is_healthy_with_as_many_healthy_workers_as_its_minimum(run, make_pool):
    async def scenario():
        lives = [fakes.Life(), fakes.Life(load=LoadFailure(500, "no"))]
        async with make_pool(*lives, max_retry_timeout=0) as pool:
            assert pool.is_healthy
            started, _ = pool.resize(2, 2)
            outcomes = [await worker.first_outcome() for worker in started]
            await fakes.drain_loop()
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
def test_gpus_are_dealt_out_and_given_back(changes, gpus, run, make_pool):
    async def scenario():
        async with make_pool(gpus=2, **changes) as pool:
            started, _ = pool.resize(3, 3)
            assert [worker.gpu_id for worker in started] == gpus
            for worker in started:
                await worker.first_outcome()
            loads = [worker.loaded[0].gpu_id for worker in pool.launcher.workers]
            assert loads == gpus
            await pool.close(0)
            assert [pool.devices.acquire() for _ in range(2)] == [(0,), (1,)]

    run(scenario())


def parallel(level: int = 2, kind: str = "tp") -> Parallel:
    return Parallel(kind, level, TorchRun(processes=level))


@pytest.mark.parametrize(
    ("ids", "blocks", "workers"), [(None, [0, 2], [29500, 29502]), ((4, 1, 3), [4], [29500])]
)
def test_a_parallel_model_has_as_many_workers_as_there_are_blocks_of_gpus(
    ids, blocks, workers, run, make_pool
):
    async def scenario():
        async with make_pool(gpus=5, parallel=parallel(), device_ids=ids) as pool:
            started, _ = pool.resize(3, 4)
            assert (pool.min_workers, pool.max_workers) == (len(blocks), len(blocks))
            assert [worker.gpu_id for worker in started] == blocks
            assert [worker.worker_id for worker in started] == workers
            for worker in started:
                await worker.first_outcome()
            assert {worker.loaded[0].gpu_id for worker in pool.launcher.workers} == {0}

    run(scenario())


def test_a_parallel_model_without_enough_gpus_has_no_workers(run, make_pool):
    async def scenario():
        async with make_pool(gpus=3, parallel=parallel(4)) as pool:
            with pytest.raises(NotEnoughDevices, match="gpu devices for model:m parallelLevel:4"):
                pool.resize(1, 1)
            assert pool.resize(0, 0) == ([], [])

    run(scenario())


def test_without_gpus_a_parallel_model_has_as_many_workers_as_were_asked_for(run, make_pool):
    async def scenario():
        async with make_pool(parallel=parallel()) as pool:
            started, _ = pool.resize(2, 2)
            assert [worker.gpu_id for worker in started] == [None, None]
            assert [worker.worker_id for worker in started] == [29500, 29502]
            for worker in started:
                await worker.first_outcome()
            assert [worker.loaded[0].gpu_id for worker in pool.launcher.workers] == [None, None]

    run(scenario())


def test_workers_that_share_the_cores_are_all_replaced_when_their_number_changes(run, make_pool):
    async def scenario():
        async with make_pool(cpu_launcher=True) as pool:
            first, _ = pool.resize(1, 1)
            assert await first[0].first_outcome() is None
            started, retired = pool.resize(2, 3)
            assert (len(started), retired) == (2, first)
            assert list(pool) == started
            await pool.retire(retired, 0)
            for worker in started:
                assert await worker.first_outcome() is None
            assert pool.resize(1, 2) == ([], [])
            assert (pool.ready, pool.alive, pool.last_gone) == (2, 2, 0)

    run(scenario())


# -- what batches cost -----------------------------------------------------------------------------

COSTS = [BatchCost(size, 0.018 + 0.002 * size, 0) for size in range(1, 5)]
PROFILED = Loaded(profiled=Profiled(COSTS))


def automatic(config: Config) -> ModelSettings:
    requested = {"is_automatic": True, "num_requests": 4}
    settings = resolve_settings(requested, {}, {}, config, gpus=0, default_workers=1)
    return replace(settings, sample_inputs=("sample.json",), max_retry_timeout=9)


async def all_up(started: list[WorkerSupervisor]) -> None:
    assert [await worker.first_outcome() for worker in started] == [None] * len(started)


def test_the_first_workers_try_the_sizes_and_nobody_after_them(run, serve_settings, config):
    async def scenario():
        lives = [fakes.Life(load=PROFILED), fakes.Life(load=PROFILED), fakes.Life()]
        async with serve_settings(automatic(config), *lives) as model:
            started, _ = model.workers.resize(2, 2)
            await all_up(started)
            assert (model.batcher.size, model.batcher.costs.mean(4)) == (4, 0.026)
            model.launcher.workers[0].crash()
            await asyncio.sleep(5)
            later, _ = model.workers.resize(3, 3)
            await all_up(later)
            assert model.workers.ready == 3
            loads = [worker.loaded[0] for worker in model.launcher.workers]
            assert [load.trials.sizes for load in loads] == [[1, 2, 3, 4]] * 2 + [[]] * 2
            assert [load.samples for load in loads] == [["sample.json"]] * 4

    run(scenario())


def test_a_model_whose_costs_nobody_asks_for_is_not_profiled(run, serve_settings, config):
    async def scenario():
        settings = resolve_settings({}, {}, {}, config, gpus=0, default_workers=1)
        async with serve_settings(settings) as model:
            started, _ = model.workers.resize(1, 1)
            await all_up(started)
            assert model.launcher.workers[0].loaded[0].trials.sizes == []
            assert not model.batcher.costs.is_known

    run(scenario())


def test_a_size_that_memory_does_not_suffice_for_is_not_used(run, serve_settings, config):
    async def scenario():
        life = fakes.Life(load=Loaded(profiled=Profiled(COSTS[:3], too_large=4)))
        async with serve_settings(automatic(config), life) as model:
            started, _ = model.workers.resize(1, 1)
            await all_up(started)
            assert model.batcher.size == 3  # the largest that fitted

    run(scenario())


def test_other_settings_reach_the_workers_that_come_later(run, serve_settings, config):
    async def scenario():
        settings = resolve_settings({}, {}, {}, config, gpus=0, default_workers=1)
        async with serve_settings(settings) as model:
            started, _ = model.workers.resize(1, 1)
            await all_up(started)
            model.reconfigure(model.settings.changed({"size": 8, "queue_size": 20}))
            assert (model.batcher.size, model.queue.capacity) == (8, 20)
            later, _ = model.workers.resize(2, 2)
            await all_up(later)
            assert [worker.loaded[0].batch_size for worker in model.launcher.workers] == [1, 8]
            assert model.workers.ready == 2

    run(scenario())


def test_a_worker_that_was_started_again_had_the_compiled_sizes_of_its_first_start(
    run, serve_settings, config
):
    async def scenario():
        settings = resolve_settings({}, {}, {}, config, gpus=0, default_workers=1)
        lives = [fakes.Life(predict=["die"]), fakes.Life()]
        async with serve_settings(settings, *lives) as model:
            started, _ = model.workers.resize(1, 1)
            await all_up(started)
            model.reconfigure(model.settings.changed({"compiled_sizes": (2, 4)}))
            request = fakes.make_request(fakes.make_input(b"a"))
            assert (await model.predict(request)).body == b"a"
            first, second = [worker.loaded[0] for worker in model.launcher.workers]
            assert (first.batch_size, first.compiled_sizes) == (1, [])
            assert (second.batch_size, second.compiled_sizes) == (4, [2, 4])

    run(scenario())


@pytest.mark.parametrize("left", [0, 1])
def test_what_a_dying_worker_held_is_run_again_only_if_somebody_is_left_to_do_it(
    left, run, serve_model
):
    async def scenario():
        lives = [fakes.Life(predict=["die"], seconds=1.0), fakes.Life(start_seconds=0.7)]
        async with serve_model(*lives) as model:
            workers = model.workers
            [dying] = workers
            answer = asyncio.ensure_future(
                model.predict(fakes.make_request(fakes.make_input(b"a")))
            )
            await asyncio.sleep(0.5)
            if left:
                workers.resize(2, 2)
                retired = workers.remove(dying)
            else:
                _, retired = workers.resize(0, 0)
            await workers.retire(retired, 10.0)
            if left:
                assert (await answer).body == b"a"
            else:
                with pytest.raises(WorkerDied):
                    await answer

    run(scenario())
