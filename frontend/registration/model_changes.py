"""The interface for changes of the served models, and the description of a model to register."""

from dataclasses import dataclass
from typing import Protocol

from marserve.frontend.configuration.setting import Fields
from marserve.frontend.serving.model_version import ModelVersion, Origin


@dataclass(frozen=True)
class Registration(Origin):
    """A model version to register; the archive must contain the version, if there is one."""

    initial_workers: int | None = None  # None for the configured number
    synchronous: bool = True  # whether to wait until the workers are READY
    is_private: bool = False  # whether a download is kept out of the model store


class ModelChanges(Protocol):
    """Changes of the served models: those of this server, or those of a catalog of models.

    Every change runs to its end, even if its caller is cancelled.
    """

    async def register(self, registration: Registration) -> ModelVersion:
        """Register a model and start its workers; a failure leaves nothing behind.

        Raises:
            Conflict: A later request has unregistered it, or changed its workers.
            ServeError: The registration failed.
        """

    async def scale(
        self, name: str, version: str | None, low: int, high: int, *, synchronous: bool
    ) -> ModelVersion:
        """Set the minimum and maximum of workers.

        Raises:
            ModelNotFound, VersionNotFound: There is no such model.
            Conflict: A later request changed them again (only when ``synchronous``).
            WorkersFailed: A new worker failed to start (only when ``synchronous``).
        """

    async def reconfigure(self, name: str, version: str | None, changes: Fields) -> ModelVersion:
        """Change settings of a served model, from the next batch on; its workers stay as they are.

        Raises:
            ModelNotFound, VersionNotFound: There is no such model.
            BadRequest: The settings contradict each other, or the measured costs of the model.
        """

    async def set_default(self, name: str, version: str) -> None:
        """Choose the version for requests that name none.

        Raises:
            ModelNotFound, VersionNotFound: There is no such version.
        """

    async def unregister(self, name: str, version: str | None = None) -> None:
        """Unregister a version: finish its accepted requests, then stop its workers.

        Raises:
            ModelNotFound, VersionNotFound, DefaultVersionInUse: It cannot be unregistered.
        """
