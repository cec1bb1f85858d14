"""Changes of the models of a catalog by clients.

A registration is carried out on this server first, so that an archive that cannot be served is
never written to the catalog; any other change is written first. Nodes of workflows are not in the
catalog, and are changed on this server only.
"""

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from marserve.frontend.aio.background import outcome_of
from marserve.frontend.catalog.document import CatalogEntry, as_read
from marserve.frontend.catalog.edits import (
    Edit,
    added,
    chosen_settings,
    with_default,
    with_settings,
    with_workers,
    without,
)
from marserve.frontend.catalog.synchroniser import Synchroniser
from marserve.frontend.configuration.setting import Fields
from marserve.frontend.registration.manager import ModelManager, changed_settings
from marserve.frontend.registration.model_changes import ModelChanges, Registration
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry

T = TypeVar("T")


@dataclass(frozen=True)
class CatalogChanges(ModelChanges):
    """Writes changes to the catalog, and applies them to this server."""

    synchroniser: Synchroniser
    manager: ModelManager
    registry: ModelRegistry

    async def register(self, registration: Registration) -> ModelVersion:
        """Register here first, then in the catalog."""
        return await self._to_its_end(self._register(registration))

    async def scale(
        self, name: str, version: str | None, low: int, high: int, *, synchronous: bool
    ) -> ModelVersion:
        """Write the numbers of workers to the catalog, and apply them."""
        if self._is_own(name):
            return await self.manager.scale(name, version, low, high, synchronous=synchronous)
        edit = with_workers(name, version, low, high)
        await self._to_its_end(self.synchroniser.change(edit))
        applied = self.synchroniser.start(self._apply(name, version))
        if synchronous:
            await outcome_of(applied)
        return self.registry.find(name, version)

    async def reconfigure(self, name: str, version: str | None, changes: Fields) -> ModelVersion:
        """Write changed settings to the catalog, and apply them."""
        if self._is_own(name):
            return await self.manager.reconfigure(name, version, changes)
        return await self._to_its_end(self._reconfigure(name, version, changes))

    async def set_default(self, name: str, version: str) -> None:
        """Write the default version to the catalog, and apply it."""
        if self._is_own(name):
            await self.manager.set_default(name, version)
        else:
            await self._to_its_end(self._change(name, version, with_default(name, version)))

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Remove a version from the catalog, and unregister it."""
        if self._is_own(name):
            await self.manager.unregister(name, version)
        else:
            await self._to_its_end(self._change(name, version, without(name, version)))

    def _is_own(self, name: str) -> bool:
        is_node = any(model.name == name and model.origin.workflow for model in self.registry)
        return is_node and self.synchroniser.convergence.model(name) is None

    async def _register(self, registration: Registration) -> ModelVersion:
        self.synchroniser.check_writable()
        model = await self.manager.register(replace(registration, is_private=True))
        settings = model.settings
        chosen = CatalogEntry(
            url=registration.url,
            handler=registration.handler,
            runtime=registration.runtime,
            s3_sse_kms=registration.s3_sse_kms,
            workers=(settings.min_workers, settings.max_workers),
            settings=chosen_settings(settings),
        )
        entry = as_read(chosen)
        try:
            await self.synchroniser.change(added(model.name, model.version, entry))
        except Exception:
            await self._hand_over(model, entry)
            raise
        await self._hand_over(model, entry)
        return model

    async def _hand_over(self, model: ModelVersion, entry: CatalogEntry) -> None:
        """Make a version one of the catalog; unregister it if it was not written there."""
        wanted = self.synchroniser.convergence.model(model.name)
        if wanted is not None and model.version in wanted.versions:
            self.synchroniser.convergence.adopt(model, entry)
            await self.synchroniser.converge(model.name)
        elif model in self.registry:
            await self.manager.unregister(model.name, model.version)

    async def _reconfigure(self, name: str, version: str | None, changes: Fields) -> ModelVersion:
        model = self.registry.find(name, version)
        changed_settings(model, changes)  # refuses those that contradict others
        await self._change(name, model.version, with_settings(name, model.version, changes))
        return self.registry.find(name, version)

    async def _change(self, name: str, version: str | None, edit: Edit) -> None:
        await self.synchroniser.change(edit)
        await self._apply(name, version)

    async def _apply(self, name: str, version: str | None) -> None:
        """Make a model as the catalog wants it; raises the error of a step for the version."""
        wanted = self.synchroniser.convergence.model(name)
        version = version or (wanted.default if wanted else None)
        for failure in await self.synchroniser.converge(name):
            if failure.version == version:
                raise failure.error

    async def _to_its_end(self, work: Coroutine[Any, Any, T]) -> T:
        return await outcome_of(self.synchroniser.start(work))
