"""Makes the model version of a registration: archive, manifest, settings, required packages."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path, PurePath

from marserve.backend.manifest import Manifest, ManifestError
from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.archives.archive import (
    Archive,
    ArchiveOpener,
    implied_model_name,
    make_helpers,
)
from marserve.frontend.archives.requirements import DependencyStore, Requirements
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_schema import TorchRun
from marserve.frontend.errors import ArchiveRefused, ModelNotFound
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.stateful.stateful_version import StatefulModelVersion
from marserve.frontend.settings.layers import CATALOG, REQUEST, SNAPSHOT
from marserve.frontend.settings.model_settings import ModelSettings, resolve_settings
from marserve.frontend.settings.parallel import Parallel
from marserve.frontend.telemetry.metrics import Metrics


class ModelBuilder:
    """Makes model versions; archives are unpacked in ``workdir``, which the caller removes."""

    def __init__(self, host: WorkerHost, metrics: Metrics, workdir: Path) -> None:
        config = host.config
        helpers = make_helpers(config)
        self._host = host
        self._metrics = metrics
        self._dependencies = DependencyStore(
            config.dependency_cache, host.python, host.environment(), helpers
        )
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
        host, config = self._host, self._host.config
        archive = await self.archives.open(
            registration.url, s3_sse_kms=registration.s3_sse_kms, is_private=registration.is_private
        )
        undo.push_async_callback(self.archives.remove, archive)
        manifest = registered_manifest(archive, registration, config)
        # In a thread: hundreds of unknown keys are compared with the known ones, letter by letter.
        settings = await in_abandonable_thread(
            registered_settings, archive, manifest, registration, host
        )
        file = manifest.requirements_file if config.install_py_dep_per_model else ""
        environment = await self._dependencies.install(
            Requirements(manifest.model_name, archive.directory, file, settings.use_venv)
        )
        await until_free(manifest)
        make = StatefulModelVersion if settings.stateful else ModelVersion
        model = make(archive, manifest, settings, host, self._metrics, environment, registration)
        undo.push_async_callback(model.close, 0)
        if registration.batch_costs:
            model.batcher.seed(point[:2] for point in registration.batch_costs)
        return model


def registered_manifest(archive: Archive, registration: Registration, config: Config) -> Manifest:
    """Return the manifest with the name, version and handler under which it is registered.

    Raises:
        ArchiveRefused: It cannot be used.
        ModelNotFound: It has another version than the registration or the snapshot.
    """
    implied_name = implied_model_name(archive.source.name)
    try:
        manifest = archive.contents.manifest or Manifest.implied(implied_name, "")
        registered = manifest.registered_as(
            name=registration.name,
            runtime=registration.runtime,
            handler=registration.handler,
            fallback_name=implied_name if registration.at_start else "",
            fallback_handler=config.default_service_handler or "",
            envelope=config.service_envelope or "",
        )
    except ManifestError as error:
        raise ArchiveRefused(str(error)) from error
    if registration.version and registration.version != registered.model_version:
        raise ModelNotFound(f"{registration.url} holds version {registered.model_version}")
    debugged = config.debugged
    if debugged and debugged.handler and debugged.model == registered.model_name:
        registered = replace(registered, handler=debugged.handler)
    runtime = registration.runtime or _configured(registered, config).get("runtimeType")
    if (runtime or registered.runtime) == "LSP":
        raise ArchiveRefused("Runtime LSP is TorchServe's C++ backend; there is only Python here.")
    return replace(registered, runtime=str(runtime)) if runtime else registered


def registered_settings(
    archive: Archive, manifest: Manifest, registration: Registration, host: WorkerHost
) -> ModelSettings:
    """Return the settings of a model, resolved from all sources.

    Raises:
        ArchiveRefused, BadRequest: It cannot be served with them.
    """
    config, gpus, source = host.config, host.devices.count, registration.source
    workers = registration.initial_workers
    is_loaded = registration.at_start or source == CATALOG
    if workers is None:
        workers = config.default_workers_per_model
        if is_loaded:
            workers = workers or gpus or host.cores
    settings = resolve_settings(
        registration.settings if source == REQUEST else {},
        archive.contents.model_yaml,
        _configured(manifest, config),
        config,
        gpus=gpus,
        default_workers=workers,
        at_start=is_loaded,
        catalog=registration.values if source == CATALOG else None,
    )
    handler = PurePath(manifest.handler.partition(":")[0]).name
    if "openai" not in settings.origins and handler.removesuffix(".py") == "vllm_handler":
        settings = replace(settings, openai="server")
    if (level := archive.contents.stage_gpus) and not settings.parallel:
        settings = replace(settings, parallel=Parallel("custom", level, TorchRun(processes=level)))
    if settings.sample_inputs and not archive.contents.has_samples:
        names = ", ".join(settings.sample_inputs)
        raise ArchiveRefused(
            f"model-config.yaml: sampleInput={names[:80]}: no such file in the archive."
        )
    if source == SNAPSHOT:
        settings = settings.restored(registration)
    if config.debugged and config.debugged.model == manifest.model_name:
        return settings.for_debugging()
    return settings


def _configured(manifest: Manifest, config: Config) -> Mapping[str, object]:
    return config.models.get(manifest.model_name, {}).get(manifest.model_version, {})
