"""Make the registered models those that a catalog wants, name by name.

Only versions that were registered from the catalog are changed: nodes of workflows are not. A step
that fails is repeated after a pause, or as soon as the catalog wants something else for the model.
"""

import asyncio
import heapq
import logging
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain, islice
from weakref import WeakKeyDictionary, WeakValueDictionary

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.catalog.document import Catalog, CatalogModel
from marserve.frontend.catalog.failed_steps import FailedSteps
from marserve.frontend.catalog.plan import (
    EntryStep,
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
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.errors import ModelNotFound, ServeError, ServerStopping, VersionConflict
from marserve.frontend.logs.formats import one_line
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import FailedLoad, ModelRegistry
from marserve.frontend.settings.layers import CATALOG

logger = logging.getLogger(__name__)

_MAX_LISTED = 5  # names or reasons in a line
_PAUSE_SECONDS = 1.0  # before the next attempt, if no step has failed


class Convergence:
    """Applies a catalog to a server."""

    def __init__(
        self, manager: ModelManager, registry: ModelRegistry, on_failure: Callable[[], object]
    ) -> None:
        self.wanted: Catalog | None = None  # until it has been read; then nothing is changed
        self.wrong: Mapping[str, str] = {}  # models whose text cannot be applied, with the reasons
        self._clock = asyncio.get_running_loop().time
        self.failures = FailedSteps(self._clock)
        self._manager = manager
        self._registry = registry
        self._on_failure = on_failure
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        #: Registrations that are in progress, by name.
        self._registering: dict[str, Register] = {}
        #: Models that are not as wanted, with the moment of the next attempt; infinite during one.
        self._due_at: dict[str, float] = {}
        self._schedule: list[tuple[float, str]] = []  # a heap; entries may be obsolete
        #: The registered versions of the catalog, with the entries that they were registered as.
        self._entries: WeakKeyDictionary[ModelVersion, ModelEntry] = WeakKeyDictionary()
        manager.await_catalog(None)

    def want(self, catalog: Catalog, background: BackgroundTasks) -> Steps[None]:
        """Set another catalog; one call at a time. The caller then converges what is `due`."""
        before, wanted, wrong = self.wanted or {}, dict(catalog), dict[str, str]()
        changed = [*(before.keys() - catalog.keys())]
        for name, model in catalog.items():
            old = before.get(name)
            if model.wrong:
                wrong[name] = model.wrong
                if old is not None:  # the earlier entry stays
                    wanted[name] = replace(model, default=old.default, versions=old.versions)
            if wanted[name] != old:
                changed.append(name)
            yield 0
        if self.wanted is None:
            self._manager.await_catalog(wanted)
        self.wanted, self.wrong = wanted, wrong
        if newly_wrong := [wrong[name] for name in changed if name in wrong]:
            logger.warning(
                "The catalog: %d models cannot be read (their earlier entries stay): %s",
                len(newly_wrong),
                "; ".join(newly_wrong[:_MAX_LISTED]),
            )
        self._supersede(wanted, background)
        for name in changed:
            if name in wrong:
                self._on_failure()
            self.failures.forget(name)
            # What has changed last comes first, before thousands of earlier models that fail.
            self._report(name, -self._clock())
            yield 0

    def due(self, now: float, most: int = sys.maxsize) -> list[str]:
        """Return the names of at most ``most`` models that the caller must converge now."""
        found: list[str] = []
        while len(found) < most and self.next_due() <= now:
            moment, name = heapq.heappop(self._schedule)
            if self._due_at.get(name) == moment:
                found.append(name)
        return found

    def next_due(self) -> float:
        """Return the next moment at which a model may be due, or infinity."""
        return self._schedule[0][0] if self._schedule else math.inf

    def unconverged(self) -> set[str]:
        """Return the names of the models that are not as the catalog wants them."""
        return self._due_at.keys() | self.wrong.keys()

    def model(self, name: str) -> CatalogModel | None:
        """Return what the catalog wants of a model; None if it has none, or was not read yet."""
        return (self.wanted or {}).get(name)

    async def converge(self, name: str) -> None:
        """Make a model as wanted, except for the steps that fail."""
        async with self._locks.setdefault(name, asyncio.Lock()):
            self._due_at[name] = math.inf
            try:
                is_whole = self.wanted is None
                while not is_whole:
                    wanted = self.model(name)
                    steps = plan(wanted, self.registered(name))
                    self.failures.forget(name, keep={step.version for step in steps})
                    is_whole = await self._apply(name, wanted, steps)
            finally:
                retries = [failure.retry_at for failure in self.failures.of(name)]
                self._report(name, max(retries, default=self._clock() + _PAUSE_SECONDS))

    async def _apply(self, name: str, wanted: CatalogModel | None, steps: list[Step]) -> bool:
        """Carry out the steps that are possible; return False if the catalog changes meanwhile."""
        failed: set[str] = set()
        for step in steps:
            if self.model(name) != wanted:
                return False
            # A version that serves is kept while its successor fails.
            ends_old = not isinstance(step, EntryStep)
            if step.version in failed or (ends_old and wanted and wanted.default in failed):
                continue
            try:
                await self._carry_out(name, step)
            except ServerStopping:
                raise
            except Exception as error:  # noqa: BLE001 - archives are untrusted; it is logged
                if self.model(name) != wanted:
                    return False
                failed.add(step.version)
                self._note_failure(name, step, error)
            else:
                others = self.failures.get(name, {}).keys() - {step.version}
                self.failures.forget(name, keep=others)
        return self.model(name) == wanted

    async def _carry_out(self, name: str, step: Step) -> None:
        manager, version = self._manager, step.version
        match step:
            case SetDefault():
                await manager.set_default(name, version)
            case Unregister():
                await manager.unregister(name, version)
            case Register(_, entry):
                self._entries[await self._register(name, step)] = entry
            case Replace(_, entry):
                old = self._registry.find(name, version)
                model = await manager.replace(old, registration_of(name, version, entry))
                self._entries[model] = entry
            case Reconfigure(_, entry):
                self._entries[
                    await manager.reconfigure_from_catalog(name, version, entry.settings)
                ] = entry
            case Scale(_, entry):
                assert entry.workers is not None
                self._entries[await self._scale(name, version, *entry.workers)] = entry

    async def _register(self, name: str, step: Register) -> ModelVersion:
        if self._registry.has(name, step.version):
            raise VersionConflict("A workflow has a node of this name here.")
        self._registering[name] = step
        try:
            return await self._manager.register(registration_of(name, step.version, step.entry))
        finally:
            del self._registering[name]

    async def _scale(self, name: str, version: str, low: int, high: int) -> ModelVersion:
        """Scale a version; raise its minimum only when the workers are ready.

        Below its minimum a server is not ready, and all replicas scale at the same time.
        """
        model = self._registry.find(name, version)
        before = model.workers.min_workers
        if before < low:
            await self._manager.scale(name, version, before, high, synchronous=True)
            # Keep workers that autoscaling has added.
            await self._manager.set_current_workers(model, max(low, len(model.workers)))
        return await self._manager.scale(name, version, low, high, synchronous=True)

    def _supersede(self, wanted: Catalog, background: BackgroundTasks) -> None:
        """Unregister versions whose workers are loading and that are not wanted any more."""
        for name, step in self._registering.items():
            model = wanted.get(name)
            entry = model.versions.get(step.version) if model else None
            # A setting that can be changed while the version is served needs no new load.
            if entry is None or not can_become(step.entry, entry):
                background.start(self._manager.unregister(name, step.version), _note)

    def registered(self, name: str) -> CatalogModel | None:
        """Return the catalog's versions of a model that are registered; None without any."""
        try:
            models = self._registry.versions(name)
        except ModelNotFound:
            return None
        entries = {each.version: self._entries[each] for each in models if each in self._entries}
        if not entries:
            return None
        return CatalogModel(self._registry.find(name).version, entries)

    def _note_failure(self, name: str, step: Step, error: Exception) -> None:
        pause = self.failures.note(name, step, error)
        self._on_failure()
        logger.warning(
            "The catalog wants %s %s, which failed (%s); tried again in %g s: %s",
            one_line(name),
            one_line(step.version),
            type(step).__name__,
            pause,
            self.failures[name][step.version].reason,
            exc_info=None if isinstance(error, ServeError | OSError) else error,
        )

    def _report(self, name: str, due: float) -> None:
        """Schedule a model that is not as wanted, and report it to the manager."""
        wanted, registered = self.model(name), self.registered(name)
        if not plan(wanted, registered):
            self._due_at.pop(name, None)
        elif due < self._due_at.get(name, math.inf):
            self._due_at[name] = due
            heapq.heappush(self._schedule, (due, name))
        is_whole = registered and wanted and wanted.versions.keys() <= registered.versions.keys()
        loads = [
            FailedLoad(name, each.url, each.reason, each.version, is_awaited=False)
            for each in self.failures.of(name)
            if not self._registry.has(name, each.version)
        ]
        if name in self.wrong and registered is None:
            shown = name.encode("utf-8", "backslashreplace").decode()  # may contain lone surrogates
            loads.append(FailedLoad(shown, "", self.wrong[name], is_awaited=False))
        names = ", ".join(dict.fromkeys(islice(chain(self.wrong, self.failures), _MAX_LISTED)))
        more = ", ..." if len(self.wrong) + len(self.failures) > _MAX_LISTED else ""
        trouble = f"not as the catalog wants them: {names}{more}" if names else ""
        is_served = bool(is_whole) or wanted is None
        self._manager.report_catalog(name, loads, trouble, is_served=is_served)


def registration_of(name: str, version: str, entry: ModelEntry) -> Registration:
    """Return the registration of an entry."""
    named = {**vars(entry), "name": name, "version": version}
    return Registration(**named, source=CATALOG, is_private=True)


def _note(error: Exception) -> None:
    logger.info("Unregistering what the catalog no longer wants: %s", one_line(error))
