"""Brings the models that are registered to those that a catalog wants, name by name.

Only what was registered from the catalog is its own (`ModelVersion.catalog_entry`): nodes of
workflows, and what is just being registered by a client, are left alone. What fails is tried again
after a while, or as soon as the catalog wants something else for the model.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace

from marserve.frontend.background import BackgroundTasks
from marserve.frontend.errors import (
    ModelNotFound,
    ServeError,
    ServerStopping,
    VersionConflict,
    VersionNotFound,
)
from marserve.frontend.logs.formats import one_line
from marserve.frontend.models.catalog.document import Catalog, CatalogEntry, CatalogModel
from marserve.frontend.models.catalog.failures import Failure, Failures
from marserve.frontend.models.catalog.plan import (
    Reconfigure,
    Register,
    Replace,
    Scale,
    SetDefault,
    Step,
    Unregister,
    can_become,
    plan,
)
from marserve.frontend.models.manager import ModelManager
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.registry import CatalogProgress, FailedLoad, ModelRegistry
from marserve.frontend.models.resolver import Registration

logger = logging.getLogger(__name__)

_KEPT = "what was read of it before stays"


class Convergence:
    """Applies a catalog to a server.

    Attributes:
        wanted: The catalog; None until it is known, and then nothing is done.
        failures: What of it could not be brought about.
    """

    def __init__(
        self, manager: ModelManager, registry: ModelRegistry, on_failure: Callable[[], object]
    ) -> None:
        self.wanted: Catalog | None = None
        self.failures = Failures(asyncio.get_running_loop().time)
        self._manager = manager
        self._registry = registry
        self._on_failure = on_failure
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        #: What is being registered now, by name.
        self._registering: dict[str, Register] = {}
        self._awaited: frozenset[str] = frozenset()
        registry.catalog_progress = CatalogProgress(
            is_known=False, trouble="the catalog has not been read yet"
        )

    def want(self, catalog: Catalog, background: BackgroundTasks) -> None:
        """Take another catalog; who calls it starts what is `due`."""
        if self.wanted is None:
            self._awaited = frozenset(catalog)
        before = self.wanted or {}
        catalog = {name: _or_before(model, before.get(name)) for name, model in catalog.items()}
        self.wanted = catalog
        changed = {name for name in {*catalog, *before} if before.get(name) != catalog.get(name)}
        for name in changed & self.wrong.keys():
            self._on_failure()
            logger.warning("The catalog: %s (%s)", one_line(self.wrong[name]), _KEPT)
        for name in changed:
            self.failures.forget(name)
        for name, step in self._registering.items():
            model = catalog.get(name)
            entry = model.versions.get(step.version) if model else None
            # What can be changed afterwards is no reason to load it once more.
            if entry is None or not can_become(step.entry, entry):
                background.start(self._supersede(name, step.version), _note)
        self._report()

    def due(self, now: float) -> list[str]:
        """Names of models that are to be converged now: not those that are, or wait for a retry."""
        waiting = self.failures.waiting(now)
        return [
            name
            for name in self._unconverged()
            if name not in waiting and not self._locks[name].locked()
        ]

    @property
    def wrong(self) -> dict[str, str]:
        """Models whose text cannot be applied, and why."""
        return {name: model.wrong for name, model in (self.wanted or {}).items() if model.wrong}

    def unconverged(self) -> list[str]:
        """Names of the models that are not as the catalog wants them."""
        return sorted({*self._unconverged(), *self.wrong})

    async def converge(self, name: str) -> list[Failure]:
        """Bring a model to what is wanted; returns what of it failed."""
        async with self._locks[name]:
            while True:
                if self.wanted is None:
                    return []
                wanted = self.wanted.get(name)
                steps = plan(wanted, self._registered(name))
                # What needs no step any more, a client has brought about.
                self.failures.forget(name, but={step.version for step in steps})
                is_whole = await self._apply(name, wanted, steps)
                self._report()
                if is_whole:
                    return self.failures.of(name)

    async def _apply(self, name: str, wanted: CatalogModel | None, steps: list[Step]) -> bool:
        """Take the steps as far as possible; False where something else is wanted meanwhile."""
        failed: set[str] = set()
        for step in steps:
            if (self.wanted or {}).get(name) != wanted:
                return False
            # What serves is kept while what is to take its place fails.
            keeps_old = isinstance(step, SetDefault | Unregister)
            if step.version in failed or (keeps_old and wanted and wanted.default in failed):
                continue
            try:
                await self._take(name, step)
            except ServerStopping:
                raise
            except Exception as error:  # noqa: BLE001 - archives are foreign; logged below
                if (self.wanted or {}).get(name) != wanted:
                    return False
                failed.add(step.version)
                self._note_failure(name, step, error)
            else:
                self.failures.pop((name, step.version), None)
        return (self.wanted or {}).get(name) == wanted

    async def _take(self, name: str, step: Step) -> None:
        manager = self._manager
        match step:
            case Register(version, entry):
                if self._has(name, version):
                    raise VersionConflict("A client is registering it here.")
                self._registering[name] = step
                try:
                    model = await manager.register(registration_of(name, version, entry))
                finally:
                    del self._registering[name]
                model.catalog_entry = entry
            case Replace(version, entry):
                old = self._registry.find(name, version)
                model = await manager.replace(old, registration_of(name, version, entry))
                model.catalog_entry = entry
            case Reconfigure(version, changes, entry):
                model = await manager.reconfigure(name, version, changes)
                model.catalog_entry = entry
            case Scale(version, workers, entry):
                model = await self._scale(name, version, *workers)
                model.catalog_entry = entry
            case SetDefault(version):
                await manager.set_default(name, version)
            case Unregister(version):
                await manager.unregister(name, version)

    async def _scale(self, name: str, version: str, low: int, high: int) -> ModelVersion:
        """Scale a version; its minimum rises only when the workers are there.

        Below its minimum a server is not ready, and all replicas scale at the same time.
        """
        model = self._registry.find(name, version)
        before = model.workers.min_workers
        if before < low:
            await self._manager.scale(name, version, before, high, synchronous=True)
            # Those that were added for the load stay.
            await self._manager.set_current_workers(model, max(low, len(model.workers)))
        return await self._manager.scale(name, version, low, high, synchronous=True)

    async def _supersede(self, name: str, version: str) -> None:
        """End a registration that is not wanted any more, if its workers are being waited for."""
        await self._manager.unregister(name, version)

    def _registered(self, name: str) -> CatalogModel | None:
        try:
            models = self._registry.versions(name)
        except ModelNotFound:
            return None
        entries = {each.version: each.catalog_entry for each in models if each.catalog_entry}
        if not entries:
            return None
        return CatalogModel(self._registry.find(name).version, entries)

    def _unconverged(self) -> Iterator[str]:
        if self.wanted is None:
            return
        registered = {model.name for model in self._registry if model.catalog_entry is not None}
        for name in {*self.wanted, *registered}:
            if plan(self.wanted.get(name), self._registered(name)):
                yield name

    def _note_failure(self, name: str, step: Step, error: Exception) -> None:
        pause = self.failures.note(name, step, error)
        self._on_failure()
        logger.warning(
            "The catalog wants %s %s, which failed (%s); tried again in %g s: %s",
            one_line(name),
            one_line(step.version),
            type(step).__name__,
            pause,
            self.failures[name, step.version].reason,
            exc_info=None if isinstance(error, ServeError | OSError) else error,
        )

    def _report(self) -> None:
        """Tell the registry what it shall say to probes, and to who asks for a model."""
        missing = {name for name in self._awaited if self._is_missing(name)}
        self._awaited = frozenset(missing)
        self._registry.failed[:] = [
            FailedLoad(each.name, each.url, each.reason, each.version, is_awaited=False)
            for each in self.failures.values()
            if not self._has(each.name, each.version)
        ]
        self._registry.failed += [
            FailedLoad(name, "", reason, is_awaited=False)
            for name, reason in self.wrong.items()
            if self._registered(name) is None
        ]
        names = sorted({*self.wrong, *self.failures.names})
        trouble = f"not as the catalog wants them: {', '.join(names)}" if names else ""
        self._registry.catalog_progress = CatalogProgress(
            is_known=self.wanted is not None, awaited=self._awaited, trouble=trouble
        )

    def _is_missing(self, name: str) -> bool:
        """Whether a model that the first catalog wanted is still not there."""
        wanted = (self.wanted or {}).get(name)
        if wanted is None:
            return False
        registered = self._registered(name)
        return registered is None or bool(wanted.versions.keys() - registered.versions.keys())

    def _has(self, name: str, version: str) -> bool:
        try:
            self._registry.find(name, version)
        except (ModelNotFound, VersionNotFound):
            return False
        return True


def registration_of(name: str, version: str, entry: CatalogEntry) -> Registration:
    """What is to be registered for an entry."""
    return Registration(
        url=entry.url,
        model_name=name,
        version=version,
        handler=entry.handler,
        runtime=entry.runtime,
        s3_sse_kms=entry.s3_sse_kms,
        catalog=entry.all_settings,
        is_private=True,
    )


def _or_before(model: CatalogModel, before: CatalogModel | None) -> CatalogModel:
    """A model, with the versions from before where they cannot be read."""
    if model.wrong and before is not None:
        return replace(model, default=before.default, versions=before.versions)
    return model


def _note(error: Exception) -> None:
    logger.info("What the catalog no longer wants: %s", one_line(error))
