"""Make the model version of a registration: archive, settings, required packages."""

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from marserve.backend.manifest import Manifest
from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.archives.archive import ArchiveOpener, make_helpers
from marserve.frontend.archives.requirements import DependencyStore
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.registration.resolver import Resolver
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.telemetry.metrics import Metrics


class ModelBuilder:
    """Makes model versions; archives are unpacked in ``workdir``, which the caller removes."""

    def __init__(self, host: WorkerHost, metrics: Metrics, workdir: Path) -> None:
        config = host.config
        helpers = make_helpers(config)
        self._host = host
        self._metrics = metrics
        self._resolver = Resolver(host)
        self._dependencies = DependencyStore(
            config.dependency_cache, host.python, host.environment(), helpers
        )
        #: Opens the archives of models, and those of workflows.
        self.archives = ArchiveOpener(config, workdir, helpers)

    async def build(
        self,
        registration: Registration,
        undo: AsyncExitStack,
        until_free: Callable[[Manifest], Awaitable[None]],
    ) -> ModelVersion:
        """Open an archive and make its model version, without workers.

        Args:
            registration: The version to make.
            undo: Gets a callback for each step that a later failure must undo.
            until_free: Waits until no other version has the name and version of a manifest.

        Raises:
            ServeError: The archive cannot be opened, or the model cannot be served.
        """
        archive = await self.archives.open(
            registration.url,
            s3_sse_kms=registration.s3_sse_kms,
            is_private=registration.is_private,
        )
        undo.push_async_callback(self.archives.remove, archive)
        manifest = self._resolver.manifest(archive, registration)
        # In a thread: hundreds of unknown keys are compared with the known ones, letter by letter.
        settings = await in_abandonable_thread(
            self._resolver.settings, archive, manifest, registration
        )
        environment = await self._dependencies.install(
            self._resolver.requirements(archive, manifest, venv=settings.use_venv)
        )
        await until_free(manifest)
        make = StatefulModelVersion if settings.stateful else ModelVersion
        host, origin = self._host, registration.origin
        model = make(archive, manifest, settings, host, self._metrics, environment, origin)
        undo.push_async_callback(model.close, 0)
        if registration.saved and registration.saved.batch_costs:
            model.batcher.seed(point[:2] for point in registration.saved.batch_costs)
        return model
