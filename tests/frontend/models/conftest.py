"""A real model version over fake workers."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from marserve.backend.manifest import Manifest
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.models.archives.archive import Archive
from marserve.frontend.models.host import WorkerHost
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.settings.model_settings import Requested, resolve_settings
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.devices import DeviceAllocator


@pytest.fixture
def serve_model(fakes: ModuleType, config: Config, tmp_path: Path) -> Callable[..., Any]:
    """A model version with one worker that is ready; closed at the end."""

    @asynccontextmanager
    async def serve(
        *lives: Any,
        archive: Archive | None = None,
        most: int = 1,
        batching: Fields | None = None,
        **changes: Any,
    ) -> AsyncIterator[ModelVersion]:
        requested = Requested(settings={"delay": 0.0, **(batching or {})})
        settled = resolve_settings(requested, {}, {}, config, gpus=0, default_workers=1)
        model = ModelVersion(
            archive or Archive("m.mar", tmp_path, "m.mar", tmp_path / "root"),
            Manifest(model_name="m", model_version="1.0", handler="h", runtime="python"),
            replace(settled, **changes),
            WorkerHost(config, fakes.FakeLauncher(*lives), DeviceAllocator(0)),
            Metrics("host"),
        )
        try:
            started, _ = model.workers.resize(1, most)
            assert await started[0].first_outcome() is None
            yield model
        finally:
            await model.close(0)
            await fakes.settled()

    return serve
