"""The model manager: registers, scales and unregisters models, and sets default versions.

Nothing else changes the registry. A change of the registry is made between two awaits, so no lock
is needed; only its effects are waited for: workers that load, and requests that finish.

Each change runs in its own task. A registration pushes an undo for each of its steps.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from marserve.backend.manifest import Manifest
from marserve.frontend.aio.background import BackgroundTasks, outcome_of, unless
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.errors import (
    BadRequest,
    ModelNotFound,
    ServeError,
    ServerStopping,
    VersionNotFound,
)
from marserve.frontend.logs.formats import one_line
from marserve.frontend.registration.memory_check import MemoryCheck
from marserve.frontend.registration.model_builder import ModelBuilder
from marserve.frontend.registration.model_changes import ModelChanges, Registration
from marserve.frontend.registration.snapshot import Snapshots, SnapshotWriter, served_models
from marserve.frontend.registration.worker_changes import WorkerChanges
from marserve.frontend.serving.host import WorkerHost
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import FailedLoad, ModelRegistry
from marserve.frontend.serving.worker_pool import WorkerOrder
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.supervisor import WorkerSupervisor

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_SERVERS_FAULT = 500  # HTTP statuses below it blame the client


def _shielded(
    change: Callable[Concatenate["ModelManager", P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["ModelManager", P], Coroutine[Any, Any, T]]:
    """Make a method run to its end even if its caller is cancelled."""

    @wraps(change)
    async def run(self: "ModelManager", /, *arguments: P.args, **named: P.kwargs) -> T:
        return await outcome_of(self._start(change(self, *arguments, **named)))

    return run


class ModelManager(ModelChanges):
    """Changes which models are served, and by how many workers.

    `snapshots` are written from `Snapshots.begin` on, and not without a writer.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        host: WorkerHost,
        metrics: Metrics,
        workdir: Path,
        snapshots: SnapshotWriter | None = None,
    ) -> None:
        config = host.config
        self._registry = registry
        self._host = host
        self._timeout = config.unregister_model_timeout
        self._builder = ModelBuilder(host, metrics, workdir)
        self.archives = self._builder.archives
        self.snapshots = Snapshots(snapshots, lambda: served_models(registry, config.model_store))
        self._background = BackgroundTasks()
        self._workers = WorkerChanges(registry, self._background, self.snapshots, self._timeout)
        self._memory = MemoryCheck(config.min_free_memory_percent)
        #: Versions that finish their requests, and what is set when they are gone.
        self._leaving: dict[ModelVersion, asyncio.Event] = {}

    @contextlib.asynccontextmanager
    async def running(
        self,
        drain: float,
        skip_drain: asyncio.Event,
        drained: Callable[[], Awaitable[object]] | None = None,
    ) -> AsyncIterator[None]:
        """Make changes within the block; after it finish the accepted requests and end the workers.

        The requests may take ``drain`` seconds, unless ``skip_drain`` is set. ``drained`` waits for
        callers that send further requests on behalf of accepted ones.
        """
        try:
            async with self._background:
                try:
                    yield
                finally:
                    for model in self._registry:
                        model.admission.refusal = ServerStopping
        finally:
            await self._close(drain, skip_drain, drained)

    @_shielded
    async def register(self, registration: Registration) -> ModelVersion:
        """Register a model, and start its workers if it has any."""
        async with AsyncExitStack() as undo:
            model = await self._builder.build(registration, undo, self._until_free)
            self._registry.check_absent(model)
            async with self._memory_for(model, registration):
                self._registry.add(model)
                undo.callback(self._remove, model)
                order, started = _start_workers(model)
                try:
                    if registration.synchronous:
                        await self._workers.wait_until_up(model, order, started)
                        _check_goal(model, model.settings)
                except BaseException:
                    if order.superseded.is_set():  # the model is the later request's now
                        undo.pop_all()
                        self._forget_failed(model, registration)
                    raise
            undo.pop_all()
        self._forget_failed(model, registration)
        _log_loaded(model)
        await self.snapshots.save()
        if not registration.synchronous and model.settings.batching.max_latency:
            self._start(_warn_of_goal(model, started))
        return model

    @_shielded
    async def replace(self, model: ModelVersion, registration: Registration) -> ModelVersion:
        """Load a version again beside the one that is served; it takes over when it is READY.

        Raises:
            ModelNotFound, VersionNotFound: The old one was unregistered meanwhile.
            ServeError: The registration failed; the old one serves on.
        """
        async with AsyncExitStack() as undo:
            successor = await self._builder.build(registration, undo, self._until_free)
            async with self._memory_for(successor, registration):
                order, started = _start_workers(successor)
                await self._workers.wait_until_up(successor, order, started)
                _check_goal(successor, successor.settings)
                self._registry.replace(model, successor)
            undo.pop_all()
        self._forget_failed(successor, registration)
        _log_loaded(successor)
        await self._end(model, successor)
        return successor

    async def scale(
        self, name: str, version: str | None, low: int, high: int, *, synchronous: bool
    ) -> ModelVersion:
        """Set the minimum and maximum of workers."""
        model = self._registry.find(name, version)
        outcome = self._start(self._workers.scale(model, version, low, high))
        if synchronous:
            await outcome_of(outcome)
        return model

    @_shielded
    async def set_current_workers(self, model: ModelVersion, count: int) -> None:
        """Set the current number of workers, within the minimum and maximum, which stay.

        Raises:
            WorkersFailed: A new worker failed to start; it was removed again.
        """
        await self._workers.set_current_count(model, count)

    @_shielded
    async def reconfigure(self, name: str, version: str | None, changes: Fields) -> ModelVersion:
        """Change settings of a served model, from the next batch on."""
        model = self._registry.find(name, version)
        return await self._set(model, changed_settings(model, changes))

    @_shielded
    async def reconfigure_from_catalog(
        self, name: str, version: str, entry: Fields
    ) -> ModelVersion:
        """Apply the settings of a changed entry of a catalog, from the next batch on."""
        model = self._registry.find(name, version)
        settings = _consistent(model.settings.with_catalog, entry)
        if settings.batching.max_latency != model.settings.batching.max_latency:
            _check_goal(model, settings)
        return await self._set(model, settings)

    async def _set(self, model: ModelVersion, settings: ModelSettings) -> ModelVersion:
        model.reconfigure(settings)
        await self.snapshots.save()
        logger.info("Batching of %s %s: %s", model.name, model.version, settings.batching)
        return model

    @_shielded
    async def set_default(self, name: str, version: str) -> None:
        """Choose the version for requests that name none."""
        self._registry.set_default(name, version)
        await self.snapshots.save()

    @_shielded
    async def unregister(self, name: str, version: str | None = None) -> None:
        """Unregister a version, or a failed load, which `/ready` then ignores."""
        try:
            model = self._registry.find(name, version)
        except (ModelNotFound, VersionNotFound):
            if not self._registry.failed.forget(name, version):
                raise
            await self.snapshots.save()
        else:
            self._registry.remove(model)
            others = [other for other in self._registry.defaults() if other.name == name]
            await self._end(model, others[0] if others else None)
        logger.info("Model %s unregistered.", name)

    def announce_stop(self) -> None:
        """Make the readiness routes answer that the server is about to stop."""
        self._registry.is_leaving = True

    def add_failed(self, load: FailedLoad) -> None:
        """Record a model that could not be loaded at start."""
        self._registry.failed.append(load)

    def await_catalog(self, names: Iterable[str] | None) -> None:
        """Set the models of a catalog without which the server is not ready.

        Until the catalog has been read, ``names`` is None and the server is not ready either.
        """
        progress = self._registry.catalog_progress
        progress.is_known, progress.awaited = names is not None, {*(names or ())}
        progress.trouble = "" if progress.is_known else "the catalog has not been read yet"

    def report_catalog(
        self, name: str, failed: Iterable[FailedLoad], trouble: str, *, is_served: bool
    ) -> None:
        """Record how far a model is as a catalog wants it.

        ``failed`` replaces the failed versions recorded before. ``trouble`` is a sentence about all
        models, or empty. ``is_served``: all wanted versions are registered, or none is wanted.
        """
        progress = self._registry.catalog_progress
        if is_served:
            progress.awaited.discard(name)
        progress.trouble = trouble
        self._registry.failed.replace(name, failed)

    async def _end(self, model: ModelVersion, successor: ModelVersion | None) -> None:
        """Finish the accepted requests of an unregistered version, and end it."""
        model.workers.order.superseded.set()
        model.admission.refusal = partial(ModelNotFound, f"Model not found: {model.name}")
        if successor is not None:
            model.hand_over(successor)
        gone = self._leaving[model] = asyncio.Event()
        await self.snapshots.save()
        try:
            await model.close(self._timeout)
            del self._leaving[model]
        finally:
            gone.set()
        await self.archives.remove(model.archive)

    async def _until_free(self, manifest: Manifest) -> None:
        """Wait until an unregistered version of this name has finished its requests."""
        name_and_version = (manifest.model_name, manifest.model_version)
        for earlier, gone in list(self._leaving.items()):
            if (earlier.name, earlier.version) == name_and_version:
                await gone.wait()  # its `unregister` has the deadline

    def _memory_for(
        self, model: ModelVersion, registration: Registration
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """Return a context that claims the memory for the workers of a model while they load."""
        copies = model.settings.min_workers
        if self._host.devices.count:
            copies = min(copies, 1)
        if registration.at_start or not any(len(each.workers) for each in self._registry):
            copies = 0
        return self._memory.claim(model.name, model.archive.directory, copies)

    def _remove(self, model: ModelVersion) -> None:
        """Undo ``add``, even if versions of the name have changed meanwhile."""
        versions = [other for other in self._registry if other.name == model.name]
        if model in versions and len(versions) > 1 and model in self._registry.defaults():
            successor = next(other for other in versions if other is not model)
            self._registry.set_default(model.name, successor.version)
        self._registry.remove(model)

    def _forget_failed(self, model: ModelVersion, registration: Registration) -> None:
        if model in self._registry:
            self._registry.failed.registered(model.name, model.version, registration.url)

    async def _close(
        self,
        drain: float,
        skip_drain: asyncio.Event,
        drained: Callable[[], Awaitable[object]] | None,
    ) -> None:
        await self.snapshots.end()
        models = [*self._registry, *self._leaving]
        await unless(skip_drain, _drain(models, drain, drained))
        async with asyncio.TaskGroup() as group:
            for model in models:
                group.create_task(model.close(0))

    def _start(self, change: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        return self._background.start(change, _log_failure)


def changed_settings(model: ModelVersion, changes: Fields) -> ModelSettings:
    """Return the settings of a model with changes of a request.

    Raises:
        BadRequest: They contradict each other, or a latency goal is below the measured costs.
    """
    settings = _consistent(model.settings.changed, changes)
    if changes.get("max_latency"):  # else the error would not be about what was asked for
        _check_goal(model, settings)
    return settings


def _consistent(change: Callable[[Fields], ModelSettings], values: Fields) -> ModelSettings:
    try:
        return change(values)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _check_goal(model: ModelVersion, settings: ModelSettings) -> None:
    try:
        settings.batching.checked_against(model.batcher.costs)
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def _warn_of_goal(model: ModelVersion, started: Sequence[WorkerSupervisor]) -> None:
    for worker in started:
        await worker.first_outcome()
    try:
        _check_goal(model, model.settings)
    except BadRequest as error:
        logger.warning("Model %s %s: %s", model.name, model.version, error)


def _start_workers(model: ModelVersion) -> tuple[WorkerOrder, list[WorkerSupervisor]]:
    low, high = model.settings.min_workers, model.settings.max_workers
    return model.workers.begin_order(low, high), model.workers.resize(low, high).started


def _log_loaded(model: ModelVersion) -> None:
    logger.info("Model %s loaded.", model.name)
    origins = ", ".join(f"{key} by {origin}" for key, origin in model.settings.origins.items())
    logger.info("Settings of %s %s were decided: %s.", model.name, model.version, origins)


def _log_failure(error: Exception) -> None:
    if isinstance(error, ServeError) and error.status < _SERVERS_FAULT:
        logger.info("A change of the models was refused: %s", one_line(error))
    else:
        traceback = None if isinstance(error, ServeError) else error
        logger.warning("A change of the models failed: %s", one_line(error), exc_info=traceback)


async def _drain(
    models: Sequence[ModelVersion], timeout: float, drained: Callable[[], Awaitable[object]] | None
) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout
    if drained is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                await drained()
    left = max(0.0, end - loop.time())
    async with asyncio.TaskGroup() as group:
        for model in models:
            group.create_task(model.admission.drain(left))
