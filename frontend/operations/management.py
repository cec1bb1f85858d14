"""What clients may do to models: list, describe, register, change, scale, unregister them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from marserve.backend.protocol import Input
from marserve.frontend.errors import MethodNotAllowed, ModelNotFound, VersionNotFound
from marserve.frontend.models.manager import ModelManager
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.models.resolver import Registration
from marserve.frontend.operations.describe import (
    customized_metadata,
    describe,
    describe_failed,
    uses_gpus,
)
from marserve.frontend.operations.model_parameters import (
    changed_settings,
    format_settings,
    read_worker_limits,
)
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.telemetry.gpu import GpuReader

#: Models or workflows on a page, at most.
MAX_LISTED = 100
T = TypeVar("T")


class Outcome(NamedTuple):
    """How a change went, as an HTTP status and a sentence."""

    status: int
    sentence: str


_IN_PROGRESS = Outcome(202, "Processing worker updates...")


@dataclass(frozen=True)
class ModelManagement:
    """The operations of the management API; they raise the ServeError that is the answer.

    Attributes:
        manager: Changes the models.
        registry: Knows them.
        gpus: What their workers' GPUs are doing.
        model_api: Whether models may be registered and unregistered.
    """

    manager: ModelManager
    registry: ModelRegistry
    gpus: GpuReader
    model_api: bool

    def list_models(self, limit: int, first: int) -> dict[str, Any]:
        """A page of the models by name, with their URLs, and the number of the next page."""
        urls = {load.name: load.url for load in self.registry.failed}
        listed = [model for model in self.registry.defaults() if not model.is_function]
        urls |= {model.name: model.archive.url for model in listed}
        names, next_page = page_of(sorted(urls), limit, first)
        page = [{"modelName": name, "modelUrl": urls[name]} for name in names]
        return {"nextPageToken": next_page, "models": page}

    async def describe(
        self, name: str, version: str | None, asked: Input | None = None
    ) -> list[dict[str, Any]]:
        """Descriptions of a version, by default the default one, or of ``all`` of a model.

        Args:
            name: Of the model.
            version: None for the default one.
            asked: The request with which the handler is asked for a description of its own; None
                where it is not asked.
        """
        is_all = version == "all"
        failed = self.registry.failed.find(name, None if is_all else version)
        try:
            if is_all:
                found = await self._described(self.registry.versions(name))
                return [*found, *map(describe_failed, failed)]
            model = self.registry.find(name, version)
        except (ModelNotFound, VersionNotFound):
            if not failed:
                raise
            return [describe_failed(load) for load in failed]
        customized = None if asked is None else await customized_metadata(model, asked)
        return await self._described([model], customized)

    async def _described(
        self, models: Sequence[ModelVersion], customized: Any = None
    ) -> list[dict[str, Any]]:
        gpus = await self.gpus.read() if any(map(uses_gpus, models)) else ()
        return [describe(model, gpus, customized) for model in models]

    def check_model_api(self) -> None:
        """Raise MethodNotAllowed unless models may be registered and unregistered."""
        if not self.model_api:
            raise MethodNotAllowed

    async def register(self, registration: Registration) -> Outcome:
        """Register a version of a model."""
        self.check_model_api()
        model = await self.manager.register(registration)
        workers = model.workers.min_workers
        if workers and not registration.synchronous:
            return _IN_PROGRESS
        sentence = (
            f'Model "{model.name}" Version: {model.version} registered with {workers} initial '
            "workers"
        )
        if workers:
            return Outcome(200, sentence)
        return Outcome(200, f"{sentence}. Use scale workers API to add workers for the model.")

    async def change(
        self, name: str, version: str | None, parameters: Parameters, *, synchronous: bool
    ) -> Outcome:
        """Change workers, batching, or both; all is looked at before anything is changed.

        Args:
            name: Of the model.
            version: None for the default one.
            parameters: By their names in TorchServe's query.
            synchronous: Whether the client waits for the workers.
        """
        changes = changed_settings(parameters)
        is_scaled = not changes or parameters.has("min_worker") or parameters.has("max_worker")
        limits = read_worker_limits(parameters, strict=bool(changes)) if is_scaled else (0, 0)
        if changes:
            model = await self.manager.reconfigure(name, version, changes)
            if not is_scaled:
                batching = format_settings(model.settings)
                sentence = f"Batching updated for model: {name}{_suffix(version)}: {batching}"
                return Outcome(200, sentence)
        return await self._scale(name, version, *limits, synchronous=synchronous)

    async def _scale(
        self, name: str, version: str | None, low: int, high: int, *, synchronous: bool
    ) -> Outcome:
        model = await self.manager.scale(name, version, low, high, synchronous=synchronous)
        if not synchronous:
            return _IN_PROGRESS
        if model.workers.ready < low:  # those that were there before may have failed
            return Outcome(206, "Workers scaling in progress...")
        return Outcome(200, f"Workers scaled to {low} for model: {name}{_suffix(version)}")

    async def set_default(self, name: str, version: str) -> Outcome:
        """Make a version the default one."""
        await self.manager.set_default(name, version)
        return Outcome(
            200, f'Default version successfully updated for model "{name}" to "{version}"'
        )

    async def unregister(self, name: str, version: str | None) -> Outcome:
        """Unregister a version, by default the default one."""
        self.check_model_api()
        await self.manager.unregister(name, version)
        return Outcome(200, f'Model "{name}" unregistered')


def page_of(listed: Sequence[T], limit: int, first: int) -> tuple[Sequence[T], str | None]:
    """Those on a page from ``first`` on, and where the next page begins; None if there is none."""
    if not 0 <= limit <= MAX_LISTED:
        limit = MAX_LISTED
    first = max(0, first)
    last = first + limit
    return listed[first:last], str(last) if last <= len(listed) else None


def _suffix(version: str | None) -> str:
    return f", version: {version}" if version else ""
