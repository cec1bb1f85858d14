"""The only hand that changes the registry: register, scale, set default, unregister.

Changes of one model follow each other (a lock per name); those of different models do not wait for
each other. A change runs in a task of its own, so that a client who hangs up does not leave it half
done. Registering pushes an undo for every step; whatever goes wrong, nothing stays behind.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.saved_models import SavedModel
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.errors import (
    BadRequest,
    ModelNotFound,
    ServeError,
    ServerStopping,
    VersionConflict,
    VersionNotFound,
    WorkersFailed,
)
from marserve.frontend.logs.setup import one_line
from marserve.frontend.models.archives.archive import (
    Archive,
    ArchiveLimits,
    has_manifest,
    implied_model_name,
    open_archive,
)
from marserve.frontend.models.archives.requirements import DependencyStore
from marserve.frontend.models.failed_loads import FailedLoad
from marserve.frontend.models.host import WorkerHost
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.preparation import Preparation, Registration
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.models.snapshot import (
    RestoreFailed,
    Snapshots,
    SnapshotWriter,
    served_models,
)
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.workers.supervisor import LoadFailed, WorkerSupervisor

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SERVERS_FAULT = 500  # below it, of HTTP statuses, the client was wrong, and is told
_ARCHIVE_ENDINGS = (".mar", ".model", ".tar.gz", ".tgz")


class ModelManager:
    """Changes which models are served, and by how many workers.

    Args:
        registry: What it changes.
        host: What all workers share.
        metrics: Where models are counted.
        workdir: Where archives are unpacked.
        snapshots: Writes down what is served; None writes nothing.

    Attributes:
        snapshots: To be begun when the server has started, and ended before it closes.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        host: WorkerHost,
        metrics: Metrics,
        workdir: Path,
        snapshots: SnapshotWriter | None = None,
    ) -> None:
        self._registry = registry
        self._host = host
        self._metrics = metrics
        self._workdir = workdir
        self._preparation = Preparation(host)
        self._dependencies = DependencyStore(
            host.config.dependency_cache, host.python, host.environment()
        )
        store = host.config.model_store
        self.snapshots = Snapshots(snapshots, lambda: served_models(registry, store))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._changes: set[asyncio.Task[Any]] = set()
        self._cancelled = threading.Event()  # looked at by threads that download and unpack
        self._leaving: set[ModelVersion] = set()
        self._stopping = False

    @property
    def _config(self) -> Config:
        return self._host.config

    async def register(self, registration: Registration) -> ModelVersion:
        """Make a model available; with workers, if any are wanted.

        Raises:
            ServeError: Why not; nothing of it is left then.
        """
        return await self._undisturbed(self._register(registration))

    async def scale(
        self,
        name: str,
        version: str | None,
        min_workers: int,
        max_workers: int,
        *,
        synchronous: bool,
    ) -> ModelVersion:
        """Have between ``min_workers`` and ``max_workers`` workers.

        Raises:
            ModelNotFound, VersionNotFound: There is no such model.
            WorkersFailed: A new worker did not come up (only when ``synchronous``).
        """
        model = self._registry.find(name, version)
        change = self._scale(model, version, min_workers, max_workers)
        if synchronous:
            await self._undisturbed(change)
        else:
            self._in_background(change)
        return model

    async def reconfigure(self, name: str, version: str | None, changes: Fields) -> ModelVersion:
        """Change how requests become batches, from the next batch on; workers are not touched.

        Raises:
            ModelNotFound, VersionNotFound: There is no such model.
            BadRequest: The settings would contradict each other, or what is known of the model.
        """
        model = self._registry.find(name, version)
        await self._undisturbed(self._reconfigure(model, changes))
        return model

    async def set_default(self, name: str, version: str) -> None:
        """Choose the version that answers where none is named.

        Raises:
            ModelNotFound, VersionNotFound: There is none.
        """
        await self._undisturbed(self._set_default(name, version))

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Take a version away: accepted requests are finished, then its workers end.

        One that the start could not load is not asked for any more.

        Raises:
            ModelNotFound, VersionNotFound, DefaultVersionInUse: It cannot be taken away.
        """
        await self._undisturbed(self._unregister(name, version))

    async def load_at_start(self, items: tuple[str, ...]) -> None:
        """Register what ``load_models`` names; what cannot be is told, and the others are served.

        Of a directory in the store that nobody named it is not known whether it is a model: where
        it is none, the server does not wait for it to become one.
        """
        is_named = [item.lower() for item in items] != ["all"]
        for name, url in self._expand(items):
            registration = Registration(url=url, model_name=name, synchronous=False, at_start=True)
            error = await self._attempt(registration)
            if error is None or isinstance(error, VersionConflict):  # then it is served already
                continue
            if is_named or not (self._config.model_store / url).is_dir():
                self._registry.failed.add(
                    FailedLoad(
                        name or implied_model_name(url),
                        url,
                        one_line(error),
                        is_name_implied=not name,
                    )
                )

    async def restore(self, saved: Sequence[SavedModel], *, is_asked: bool) -> None:
        """Register what a snapshot remembers; what cannot be is told, and the others are served.

        Args:
            saved: What it remembers.
            is_asked: Whether somebody named the snapshot, who then wants all archives to be there.

        Raises:
            RestoreFailed: One is not.
        """
        if not saved:
            logger.warning("The snapshot holds no models, so none are registered.")
        for one in saved:
            await self._restore(one, is_asked=is_asked)
        for one in saved:
            if one.is_default and not self._registry.failed.find(one.name, one.version):
                self._registry.set_default(one.name, one.version)

    async def vary_workers(self, model: ModelVersion, count: int) -> None:
        """Have ``count`` workers for now, within its minimum and maximum, which stay.

        A worker that does not come up is taken out again.

        Raises:
            WorkersFailed: That happened.
        """
        await self._undisturbed(self._vary(model, count))

    async def close(self, drain: float, abandon: asyncio.Event | None = None) -> None:
        """Take no more requests, finish the accepted ones, end workers.

        Args:
            drain: Seconds that the accepted requests may take.
            abandon: Ends that time early.
        """
        self._stopping = True
        self._cancelled.set()
        for model in self._registry:
            model.refuse(ServerStopping())
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        await self.snapshots.end()
        models = [*self._registry, *self._leaving]
        await _drain(models, drain, abandon or asyncio.Event())
        await asyncio.gather(*(model.close(0) for model in models))
        for model in models:
            await asyncio.to_thread(_remove_unpacked, model.archive)

    async def _register(self, registration: Registration) -> ModelVersion:
        archive = await self._open(registration)
        async with AsyncExitStack() as undo:
            undo.push_async_callback(asyncio.to_thread, archive.remove)
            manifest = self._preparation.manifest(archive, registration)
            settings = await asyncio.to_thread(
                self._preparation.settings, archive, manifest, registration
            )
            environment = await self._dependencies.provide(
                self._preparation.wanted(archive, manifest, venv=settings.use_venv)
            )
            model = ModelVersion(
                archive, manifest, settings, self._host, self._metrics, environment
            )
            model.loaded_at_start = registration.at_start
            model.chosen_handler = registration.handler
            if registration.saved and registration.saved.batch_costs:
                model.batcher.seed(one[:2] for one in registration.saved.batch_costs)
            async with self._lock(model.name):
                undo.push_async_callback(model.close, 0)
                self._registry.add(model)
                undo.callback(self._registry.remove, model)
                started, _ = model.workers.resize(settings.min_workers, settings.max_workers)
                if registration.synchronous:
                    await self._all_up(model, model.version, started)
                    _check_goal(model)
            undo.pop_all()
        self._registry.failed.registered(model.name, model.version, registration.url)
        logger.info("Model %s loaded.", model.name)
        origins = ", ".join(f"{key} by {origin}" for key, origin in settings.origins.items())
        logger.info("Settings of %s %s were decided: %s.", model.name, model.version, origins)
        await self.snapshots.save()
        if not registration.synchronous and settings.batching.max_latency:
            self._in_background(_warn_of_goal(model, started))
        return model

    async def _restore(self, saved: SavedModel, *, is_asked: bool) -> None:
        registration = Registration(
            url=saved.archive,
            model_name=saved.name,
            handler=saved.handler,
            runtime=saved.runtime,
            synchronous=False,
            saved=saved,
        )
        error = await self._attempt(registration)
        if isinstance(error, ModelNotFound) and is_asked:
            raise RestoreFailed(f"{_not_in_store(saved)}: {error}")
        if error is not None:
            failed = FailedLoad(saved.name, saved.archive, one_line(error), saved.version, saved)
            self._registry.failed.add(failed)

    async def _attempt(self, registration: Registration) -> Exception | None:
        """Register while the server starts; why it failed, if it did."""
        try:
            await self.register(registration)
        except Exception as error:  # an archive is foreign: the others are served
            foreseen = isinstance(error, ServeError | OSError)
            told = None if foreseen else error
            logger.error(  # noqa: TRY400 - a traceback where it says more than the sentence
                "Failed to load model: %s: %s", registration.url, one_line(error), exc_info=told
            )
            return error
        return None

    async def _open(self, registration: Registration) -> Archive:
        limits = ArchiveLimits(
            max_bytes=self._config.max_archive_size or None, cancelled=self._cancelled.is_set
        )
        return await asyncio.to_thread(
            open_archive,
            registration.url,
            model_store=self._config.model_store,
            allowed_urls=self._config.allowed_urls,
            workdir=self._workdir,
            limits=limits,
            s3_sse_kms=registration.s3_sse_kms,
        )

    async def _set_default(self, name: str, version: str) -> None:
        async with self._lock(name):
            self._registry.set_default(name, version)
            await self.snapshots.save()

    async def _reconfigure(self, model: ModelVersion, changes: Fields) -> None:
        async with self._lock(model.name):
            self._check_served(model)
            try:
                settings = model.settings.changed(changes)
                if "max_latency" in changes:  # else it is not what was asked for that is wrong
                    settings.batching.checked_against(model.batcher.costs)
            except ValueError as error:
                raise BadRequest(str(error)) from error
            model.reconfigure(settings)
            await self.snapshots.save()
        logger.info("Batching of %s %s: %s", model.name, model.version, settings.batching)

    def _check_served(self, model: ModelVersion) -> None:
        """It may have been unregistered while a change waited for others.

        Raises:
            ModelNotFound: It was.
        """
        if self._registry.find(model.name, model.version) is not model:
            raise ModelNotFound(f"Model not found: {model.name}")

    async def _scale(
        self, model: ModelVersion, version: str | None, min_workers: int, max_workers: int
    ) -> None:
        async with self._lock(model.name):
            self._check_served(model)
            timeout = self._config.unregister_model_timeout
            if not max_workers:  # nobody will be left for the queue: first let it be served
                model.refuse(model.no_worker())
                await model.drain(timeout)
            started, retired = model.workers.resize(min_workers, max_workers)
            model.refuse(None)
            await model.workers.retire(retired, timeout)
            await self.snapshots.save()
            await self._all_up(model, version, started)

    async def _vary(self, model: ModelVersion, count: int) -> None:
        async with self._lock(model.name):
            if model not in self._registry:
                return
            started, retired = model.workers.vary(count)
            await model.workers.retire(retired, self._config.unregister_model_timeout)
        # Without the lock, so that nobody waits for a worker that only might be of use.
        try:
            await self._all_up(model, model.version, started)
        except WorkersFailed:
            for worker in started:
                await model.workers.retire(model.workers.take_out(worker), 0)
            raise

    async def _all_up(
        self, model: ModelVersion, version: str | None, workers: list[WorkerSupervisor]
    ) -> None:
        """Wait until all of them are READY.

        Raises:
            WorkersFailed: The first that is not, with its reason.
        """
        waits = [asyncio.ensure_future(worker.first_outcome()) for worker in workers]
        try:
            for wait in asyncio.as_completed(waits):
                failure = await wait
                if failure is not None:
                    raise WorkersFailed(
                        f"Failed to start workers for model {model.name} version: "
                        f"{version or 'null'}. {failure}",
                        status=failure.code if isinstance(failure, LoadFailed) else None,
                    )
        finally:
            for unfinished in waits:
                unfinished.cancel()

    async def _unregister(self, name: str, version: str | None) -> None:
        async with self._lock(name):
            try:
                model = self._registry.find(name, version)
            except (ModelNotFound, VersionNotFound):
                if not self._registry.failed.remove(name, version):
                    raise
            else:
                self._registry.remove(model)
                model.refuse(ModelNotFound(f"Model not found: {name}"))
                self._leaving.add(model)
                await model.close(self._config.unregister_model_timeout)
                await asyncio.to_thread(model.archive.remove)
                self._leaving.discard(model)
            await self.snapshots.save()
        logger.info("Model %s unregistered.", name)

    def _expand(self, items: tuple[str, ...]) -> list[tuple[str, str]]:
        """``load_models`` as pairs of name (may be empty) and URL."""
        if [item.lower() for item in items] == ["all"]:
            return [("", url) for url in self._everything_in_store()]
        pairs = []
        for item in items:
            name, equals, url = item.partition("=")
            pairs.append((name.strip(), url.strip()) if equals else ("", item.strip()))
        return pairs

    def _everything_in_store(self) -> list[str]:
        return sorted(
            entry.name
            for entry in self._config.model_store.iterdir()
            if not entry.name.startswith(".")
            and (
                self._may_be_model(entry)
                if entry.is_dir()
                else entry.name.endswith(_ARCHIVE_ENDINGS)
            )
        )

    def _may_be_model(self, directory: Path) -> bool:
        """Whether a directory has a handler: others lie in stores, too, such as ``lost+found``."""
        if self._config.default_service_handler or has_manifest(directory):
            return True
        name = one_line(directory.name)
        logger.info("%s in the model store has no manifest: it is no model.", name)
        return False

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _undisturbed(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end even if whoever asked for it leaves."""
        task = self._in_background(change)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # not whoever asked, but the server's end
                raise ServerStopping from None
            raise

    def _in_background(self, change: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        if self._stopping:
            change.close()
            raise ServerStopping
        task = asyncio.ensure_future(change)
        self._changes.add(task)
        task.add_done_callback(self._changed)
        return task

    def _changed(self, task: "asyncio.Task[Any]") -> None:
        self._changes.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # fetched here too: nobody may be waiting any more
        if isinstance(error, ServeError) and error.status < _SERVERS_FAULT:
            logger.info("A change of the models was refused: %s", one_line(error))
        elif error is not None:
            foreseen = isinstance(error, ServeError)
            logger.warning(
                "A change of the models failed: %s",
                one_line(error),
                exc_info=None if foreseen else error,
            )


async def _drain(models: Sequence[ModelVersion], timeout: float, abandon: asyncio.Event) -> None:
    """Wait until all accepted requests are answered, or nobody wants to wait any more."""
    drained = asyncio.gather(*(model.drain(timeout) for model in models))
    abandoned = asyncio.ensure_future(abandon.wait())
    ends: set[asyncio.Future[Any]] = {drained, abandoned}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    await asyncio.gather(*ends, return_exceptions=True)


def _check_goal(model: ModelVersion) -> None:
    """Refuse a latency goal that not even a request by itself can meet.

    Raises:
        BadRequest: It is one.
    """
    try:
        model.settings.batching.checked_against(model.batcher.costs)
    except ValueError as error:
        raise BadRequest(str(error)) from error


async def _warn_of_goal(model: ModelVersion, started: Sequence[WorkerSupervisor]) -> None:
    """Tell of such a goal when nobody waits for the workers."""
    for worker in started:
        await worker.first_outcome()
    try:
        _check_goal(model)
    except BadRequest as error:
        logger.warning("Model %s %s: %s", model.name, model.version, error)


def _not_in_store(saved: SavedModel) -> str:
    which = f"model :{saved.name}, version :{saved.version}"  # TorchServe's sentence, as it was
    return f"Model archive file for {which} not found in model store"


def _remove_unpacked(archive: Archive) -> None:
    """At the end of the server a downloaded archive stays in the store, what was unpacked goes."""
    replace(archive, downloaded=None).remove()
