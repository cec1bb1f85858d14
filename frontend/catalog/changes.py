"""Changes by requests on a server whose models are those of a catalog."""

from dataclasses import dataclass

from marserve.frontend.configuration.setting import Fields
from marserve.frontend.errors import CatalogReadOnly, ModelNotFound
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.registration.model_changes import ModelChanges, Registration
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry


@dataclass(frozen=True)
class CatalogChanges(ModelChanges):
    """Refuses changes of the catalog's models; nodes of workflows, which it has not, are changed.

    Each method raises CatalogReadOnly where a model is not a node of a workflow.
    """

    place: str  # of the catalog, without secrets
    manager: ModelManager
    registry: ModelRegistry

    async def register(self, registration: Registration) -> ModelVersion:  # noqa: ARG002
        """Refuse: nodes are registered with their workflow."""
        raise CatalogReadOnly(self.place)

    async def scale(
        self, name: str, version: str | None, low: int, high: int, *, synchronous: bool
    ) -> ModelVersion:
        """Set the number of workers of a node."""
        return await self._of_node(name).scale(name, version, low, high, synchronous=synchronous)

    async def reconfigure(self, name: str, version: str | None, changes: Fields) -> ModelVersion:
        """Change settings of a node."""
        return await self._of_node(name).reconfigure(name, version, changes)

    async def set_default(self, name: str, version: str) -> None:
        """Choose the default version of a node."""
        await self._of_node(name).set_default(name, version)

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Unregister a node."""
        await self._of_node(name).unregister(name, version)

    def _of_node(self, name: str) -> ModelManager:
        try:
            versions = self.registry.versions(name)
        except ModelNotFound:
            versions = []
        if not versions or not all(each.origin.workflow for each in versions):
            raise CatalogReadOnly(self.place)
        return self.manager
