"""The management of models: list, describe, register, change, scale, unregister."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from marserve.backend.protocol import Input
from marserve.frontend.errors import MethodNotAllowed, ModelNotFound, VersionNotFound
from marserve.frontend.logs.formats import one_line
from marserve.frontend.operations.describe import customized_metadata, describe, describe_failed
from marserve.frontend.operations.model_parameters import (
    changed_settings,
    changes_batching,
    format_settings,
    read_registration,
    read_worker_limits,
    refuse_unintended_scaling,
    unread_parameters,
)
from marserve.frontend.operations.parameters import Parameters
from marserve.frontend.registration.model_changes import ModelChanges, Registration
from marserve.frontend.security.usage import RequestMemory
from marserve.frontend.serving.model_version import ModelVersion
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.gpu import GpuReader

logger = logging.getLogger(__name__)

#: The maximum number of models or workflows on a page.
MAX_LISTED = 100
# A comparison takes at most 2 s, and the batches of clients that a worker runs meanwhile.
_COMPARISON_SECONDS = 5.0
T = TypeVar("T")


class Outcome(NamedTuple):
    """The result of a change: HTTP status, sentence, and a warning for each ignored parameter."""

    status: int
    sentence: str
    warnings: tuple[str, ...] = ()


_IN_PROGRESS = Outcome(202, "Processing worker updates...")


@dataclass(frozen=True)
class ModelManagement:
    """The operations of the management API; they raise `ServeError`."""

    manager: ModelChanges  # that of this server, or of the catalog
    registry: ModelRegistry
    gpus: GpuReader
    model_api: bool  # whether models may be registered and unregistered
    describe_catalog: Callable[[], dict[str, Any]] | None = None  # None without a catalog

    def list_models(self, limit: int, first: int) -> dict[str, Any]:
        """Return a page of the models by name, with their URLs, and the number of the next page."""
        urls = {load.name: load.url for load in self.registry.failed}
        listed = [model for model in self.registry.defaults() if not model.origin.is_function]
        urls |= {model.name: model.archive.url for model in listed}
        names, next_page = page_of(sorted(urls), limit, first)
        page = [{"modelName": name, "modelUrl": urls[name]} for name in names]
        return {"nextPageToken": next_page, "models": page}

    async def describe(
        self, name: str, version: str | None, memory: RequestMemory, asked: Input | None = None
    ) -> list[dict[str, Any]]:
        """Return the description of one version, or of all versions of a model (``"all"``).

        ``asked`` is the request for the handler's own description, which is counted in ``memory``;
        None leaves that out.
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
        customized = None if asked is None else await customized_metadata(model, asked, memory)
        return await self._described([model], customized)

    async def _described(
        self, models: Sequence[ModelVersion], customized: Any = None
    ) -> list[dict[str, Any]]:
        uses_gpus = any(worker.gpu_id is not None for each in models for worker in each.workers)
        gpus = await self.gpus.read() if uses_gpus else ()
        return [describe(model, gpus, customized) for model in models]

    def check_model_api(self) -> None:
        """Raise MethodNotAllowed unless models may be registered and unregistered."""
        if not self.model_api:
            raise MethodNotAllowed

    def catalog(self) -> dict[str, Any]:
        """Return the catalog of the models, and its progress."""
        return self.describe_catalog() if self.describe_catalog else {"catalog": None}

    async def register(self, parameters: Parameters) -> Outcome:
        """Register a version of a model; parameters have TorchServe's names."""
        self.check_model_api()
        registration = read_registration(parameters)
        found = unread_parameters(parameters, is_registration=True)
        unread = logged(found, f"Registration of {registration.url}")
        model = await self.manager.register(registration)
        outcome = _registered(model, registration)
        return outcome._replace(warnings=(*unread, *model.warnings))

    async def change(self, name: str, version: str | None, parameters: Parameters) -> Outcome:
        """Change workers, batching, or both; all parameters are checked before the first change.

        Without a ``version``, a parameter may name it.
        """
        found = unread_parameters(parameters, is_registration=False)
        unread = logged(found, f"Change of {name}")
        version = version or parameters.text("model_version") or None
        outcome = await self._change(name, version, parameters, unread)
        return outcome._replace(warnings=(*unread, *outcome.warnings))

    async def _change(
        self, name: str, version: str | None, parameters: Parameters, unread: Sequence[str]
    ) -> Outcome:
        changes, is_batching = changed_settings(parameters), changes_batching(parameters)
        has_workers = parameters.has("min_worker") or parameters.has("max_worker")
        is_scaled = has_workers or not is_batching
        if is_scaled and not has_workers:
            refuse_unintended_scaling(parameters, unread)
        limits = read_worker_limits(parameters, strict=is_batching) if is_scaled else (0, 0)
        warnings: tuple[str, ...] = ()
        if is_batching:
            model = await self.manager.reconfigure(name, version, changes)
            warnings = await _compared(model)
            if not is_scaled:
                batching = format_settings(model.settings)
                sentence = f"Batching updated for model: {name}{_suffix(version)}: {batching}"
                return Outcome(200, sentence, warnings)
        outcome = await self._scale(name, version, parameters, limits)
        return outcome._replace(warnings=warnings)

    async def _scale(
        self, name: str, version: str | None, parameters: Parameters, limits: tuple[int, int]
    ) -> Outcome:
        low, high = limits
        synchronous = parameters.flag("synchronous", default=False)
        model = await self.manager.scale(name, version, low, high, synchronous=synchronous)
        if not synchronous:
            return _IN_PROGRESS
        if model.workers.ready < low:  # older workers may have failed
            return Outcome(206, "Workers scaling in progress...")
        return Outcome(200, f"Workers scaled to {low} for model: {name}{_suffix(version)}")

    async def set_default(self, name: str, version: str) -> Outcome:
        """Make a version the default version."""
        await self.manager.set_default(name, version)
        return Outcome(
            200, f'Default version successfully updated for model "{name}" to "{version}"'
        )

    async def unregister(self, name: str, version: str | None) -> Outcome:
        """Unregister a version; None is the default version."""
        self.check_model_api()
        await self.manager.unregister(name, version)
        return Outcome(200, f'Model "{name}" unregistered')


def _registered(model: ModelVersion, registration: Registration) -> Outcome:
    workers = model.workers.min_workers
    if workers and not registration.synchronous:
        return _IN_PROGRESS
    sentence = (
        f'Model "{model.name}" Version: {model.version} registered with {workers} initial workers'
    )
    if workers:
        return Outcome(200, sentence)
    return Outcome(200, f"{sentence}. Use scale workers API to add workers for the model.")


async def _compared(model: ModelVersion) -> tuple[str, ...]:
    """Wait for a comparison of batches that the change has begun; return what it has found."""
    validation = model.workers.validation
    await validation.ended(_COMPARISON_SECONDS)
    failure = validation.found.get("failure")  # not while it is pending
    is_used = failure and model.settings.batching.is_automatic
    return (f"validateBatching: {failure}.",) if is_used else ()


def logged(sentences: Sequence[str], what: str) -> tuple[str, ...]:
    """Return warnings about a change, after logging them."""
    for sentence in sentences:
        logger.warning("%s: %s", one_line(what), sentence)
    return tuple(sentences)


def page_of(listed: Sequence[T], limit: int, first: int) -> tuple[Sequence[T], str | None]:
    """Return the items of the page from ``first`` on, and the number of the next page, or None."""
    if not 0 <= limit <= MAX_LISTED:
        limit = MAX_LISTED
    first = max(0, first)
    last = first + limit
    return listed[first:last], str(last) if last <= len(listed) else None


def _suffix(version: str | None) -> str:
    return f", version: {version}" if version else ""
