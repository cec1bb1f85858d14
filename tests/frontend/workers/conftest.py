"""Queues that a fake worker serves, in some way."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import Load
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.batching.job_queue import JobQueue
from marserve.frontend.batching.jobs import Group, Job
from marserve.frontend.batching.options import Batching
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.batch_validation import BatchValidation
from marserve.frontend.workers.launchers.local_process import WorkerSpec
from marserve.frontend.workers.supervisor import WorkerSupervisor


@pytest.fixture(scope="session")
def served():
    """See `serving_with`."""
    return serving_with()


def serving_with() -> Callable[..., Any]:
    """Make queues that a fake worker serves, in some way."""

    @asynccontextmanager
    async def make(
        way: Any,
        size: int = 2,
        lives: Sequence[dict[str, Any]] = (),
        batching: Mapping[str, Any] = {},
        **life: Any,
    ) -> AsyncIterator[Any]:
        loop = asyncio.get_running_loop()
        queue = JobQueue(100)
        batching_settings = Batching(**{"size": size, "delay": 0.0, **batching})
        batcher = Batcher(queue, batching_settings, loop, loop.time)
        launcher = fakes.FakeLauncher(*[fakes.Life(**life) for life in lives or [life]])
        metrics = Metrics("host")
        supervisor = WorkerSupervisor(
            worker_id=9000,
            spec=WorkerSpec("W", {}, (), "/m", 0),
            load=Load("m", "/m", "h", size, None, True, 1000, "1"),
            startup_timeout=20.0,
            retry_window=300.0,
            make_dispatch=partial(way, has_workers_left=lambda: True),
            batcher=batcher,
            validation=BatchValidation("m", batcher, list),
            launcher=launcher,
            metrics=ModelMetrics(metrics, "m", "1.0"),
        )
        supervisor.start(lambda: None)
        await supervisor.first_outcome()

        def put(id_: str, group: Group = Group.PREDICT) -> Job:
            input_ = fakes.make_input(id_.encode(), id_=id_)
            job = fakes.AwaitedJob(input_, loop.time(), loop.create_future(), group)
            batcher.put(job)
            return job

        def counted(name: str) -> float:
            labels = {"model_name": "m", "model_version": "1.0", "hostname": "host"}
            return fakes.sample_value(metrics, name, labels) or 0.0

        put.batcher = batcher
        put.batches = launcher.workers[0].batches
        put.workers = launcher.workers
        put.counted = counted
        put.stop = supervisor.stop
        try:
            yield put
        finally:
            await supervisor.stop(0)
            await fakes.drain_loop()

    return make
