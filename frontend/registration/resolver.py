"""The manifest, settings and requirements of a registration, from its archive and configuration."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from marserve.backend.manifest import Manifest, ManifestError
from marserve.frontend.archives.archive import Archive, implied_model_name
from marserve.frontend.archives.requirements import Requirements
from marserve.frontend.errors import ArchiveRefused, ModelNotFound
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.settings.model_settings import ModelSettings, resolve_settings


class Resolver:
    """Resolves the archive, the registration and the configuration of a model."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._config = host.config

    def manifest(self, archive: Archive, registration: Registration) -> Manifest:
        """Return the manifest with the name, version and handler under which it is registered.

        Raises:
            ArchiveRefused: It cannot be used.
            ModelNotFound: It has another version than the registration or the snapshot.
        """
        implied_name = implied_model_name(archive.source.name)
        try:
            manifest = archive.contents.manifest or Manifest.implied(implied_name, "")
            registered = manifest.registered_as(
                name=registration.model_name,
                runtime=registration.runtime,
                handler=registration.handler,
                fallback_name=implied_name if registration.at_start else "",
                fallback_handler=self._config.default_service_handler or "",
                envelope=self._config.service_envelope or "",
            )
        except ManifestError as error:
            raise ArchiveRefused(str(error)) from error
        wanted = registration.saved.version if registration.saved else registration.version
        if wanted and wanted != registered.model_version:
            raise ModelNotFound(f"{registration.url} holds version {registered.model_version}")
        debugged = self._config.debugged
        if debugged and debugged.handler and debugged.model == registered.model_name:
            registered = replace(registered, handler=debugged.handler)
        runtime = registration.runtime or self._configured(registered).get("runtimeType")
        if (runtime or registered.runtime) == "LSP":
            raise ArchiveRefused(
                "Runtime LSP is TorchServe's C++ backend; there is only Python here."
            )
        return replace(registered, runtime=str(runtime)) if runtime else registered

    def settings(
        self, archive: Archive, manifest: Manifest, registration: Registration
    ) -> ModelSettings:
        """Return the settings of a model, resolved from all sources.

        Raises:
            ArchiveRefused, BadRequest: It cannot be served with them.
        """
        gpus = self._host.devices.count
        workers = registration.initial_workers
        is_loaded = registration.at_start or registration.catalog is not None
        if workers is None:
            workers = self._config.default_workers_per_model
            if is_loaded:
                workers = workers or gpus or self._host.cores
        settings = resolve_settings(
            registration.settings,
            archive.contents.model_yaml,
            self._configured(manifest),
            self._config,
            gpus=gpus,
            default_workers=workers,
            at_start=is_loaded,
            catalog=registration.catalog,
        )
        if settings.sample_inputs and not archive.contents.has_samples:
            names = ", ".join(settings.sample_inputs)
            raise ArchiveRefused(
                f"model-config.yaml: sampleInput={names[:80]}: no such file in the archive."
            )
        if registration.saved:
            settings = settings.restored(registration.saved)
        debugged = self._config.debugged
        if debugged and debugged.model == manifest.model_name:
            return _debuggable(settings)
        return settings

    def requirements(self, archive: Archive, manifest: Manifest, *, venv: bool) -> Requirements:
        """Return the packages that its workers need."""
        file = manifest.requirements_file if self._config.install_py_dep_per_model else ""
        return Requirements(manifest.model_name, archive.directory, file, venv)

    def _configured(self, manifest: Manifest) -> Mapping[str, object]:
        return self._config.models.get(manifest.model_name, {}).get(manifest.model_version, {})


def handler_path(text: str) -> str:
    """Return a handler of a command line; an existing file by its absolute path."""
    file, colon, function = text.partition(":")
    return f"{Path(file).absolute()}{colon}{function}" if Path(file).is_file() else text


def _debuggable(settings: ModelSettings) -> ModelSettings:
    """Return the settings of a model whose handler is debugged.

    Raises:
        ArchiveRefused: Its worker consists of several processes, and there is one terminal.
    """
    if settings.parallel and settings.has_ranks:
        raise ArchiveRefused(
            f"parallelType={settings.parallel.type}: its worker is several processes, which cannot "
            "be debugged in one terminal."
        )
    return settings.for_debugging()
