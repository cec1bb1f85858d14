"""Fixtures of a real model version over fake workers."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import fakes
import pytest

from marserve.backend.manifest import Manifest
from marserve.frontend.archives.archive import Archive
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.model_version import ModelVersion, Origin
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.settings.model_settings import resolve_settings
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.devices import DeviceAllocator


def saved_entry(workers: tuple[int, int] = (1, 2), **settings: Any) -> ModelEntry:
    """An entry of a snapshot, with the settings that each has."""
    always = {"size": 3, "is_automatic": False, "delay": 0.07}
    always |= {"response_timeout": 33, "startup_timeout": 120}
    return ModelEntry(
        "m.mar",
        "m",
        "1.0",
        runtime="python",
        workers=workers,
        settings=always | settings,
        is_default=True,
    )


@pytest.fixture
def serve_model(config, tmp_path):
    """A model version whose workers are ready; closed at the end."""

    @asynccontextmanager
    async def serve(
        *lives,
        archive=None,
        workers=1,
        max_workers=None,
        metrics=None,
        batching=None,
        origin=None,
        **changes,
    ):
        requested = {"delay": 0.0, **(batching or {})}
        settings = resolve_settings(requested, {}, {}, config, gpus=0, default_workers=1)
        settings = replace(settings, **changes)
        make = StatefulModelVersion if settings.stateful else ModelVersion
        model = make(
            archive or Archive("m.mar", tmp_path, tmp_path / "root", tmp_path / "m.mar"),
            Manifest(model_name="m", model_version="1.0", handler="h", runtime="python"),
            settings,
            WorkerHost(config, fakes.FakeLauncher(*lives), DeviceAllocator(0)),
            metrics or Metrics("host"),
            origin=origin or Origin(""),
        )
        try:
            started, _ = model.workers.resize(workers, max_workers or workers)
            for worker in started:
                assert await worker.first_outcome() is None
            yield model
        finally:
            await model.close(0)
            await fakes.drain_loop()

    return serve


@pytest.fixture
def ask():
    """Begin to ask a model; the rest are members of `PredictRequest`."""

    def begin(model, body=b"x", **members):
        request = fakes.make_request(fakes.make_input(body), **members)
        return asyncio.ensure_future(model.predict(request))

    return begin


@pytest.fixture
def answers_to():
    """Submit a request of rows with these bodies, and wait for their answers."""

    async def answers(model, *bodies):
        rows = [fakes.make_input(body) for body in bodies]
        request = fakes.make_request(rows[0])
        return [bytes(answer.body) for answer in await model.predict_all(request, rows)]

    return answers
