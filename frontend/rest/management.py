"""The management listener: register, list, describe, scale, set the default, unregister; tokens."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from marserve.frontend.errors import MethodNotAllowed, ModelNotFound, RouteNotFound, VersionNotFound
from marserve.frontend.http.authentication import TokenStore
from marserve.frontend.http.parameters import query_parameters
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import HttpRequest, Route
from marserve.frontend.models.manager import ModelManager
from marserve.frontend.models.model_version import ModelVersion
from marserve.frontend.models.registry import ModelRegistry
from marserve.frontend.rest.api_description import describe_listener, describe_model_management
from marserve.frontend.rest.describe import (
    customized_metadata,
    describe,
    describe_failed,
    uses_gpus,
)
from marserve.frontend.rest.model_parameters import (
    changed_settings,
    format_settings,
    read_registration,
    read_worker_limits,
)
from marserve.frontend.rest.shared_routes import has_version, refuse_workflow
from marserve.frontend.telemetry.gpu import GpuReader

_MAX_LISTED = 100
_IN_PROGRESS = "Processing worker updates..."

Serve = Callable[[HttpRequest], Awaitable[HttpResponse]]


def management_routes(
    manager: ModelManager,
    registry: ModelRegistry,
    gpus: GpuReader,
    *,
    tokens: TokenStore | None,
    model_api: bool,
    max_request_bytes: int,
) -> Mapping[str, Route]:
    """The routes of the management listener.

    Args:
        manager: Changes the models.
        registry: Knows them.
        gpus: What their workers' GPUs are doing.
        tokens: Keys that can be renewed; None when authorization is off.
        model_api: Whether models may be registered and unregistered.
        max_request_bytes: Longest body of a registration.
    """
    management = _Management(manager, registry, gpus, model_api, max_request_bytes)
    routes = {
        "models": Route(management.models, "management"),
        "v1": Route(management.kserve_model, "management"),
        "workflows": Route(refuse_workflow, "management"),
    }
    if tokens is not None:

        async def renew(request: HttpRequest) -> HttpResponse:
            kind = query_parameters(request).text("type") or None
            tokens.renew(kind, request.headers.get("Authorization"))
            return HttpResponse(200, b"\n", {"content-type": "application/json"})

        routes["token"] = Route(renew)  # guarded by the API key, which it checks itself
    return routes


@dataclass(frozen=True)
class _Management:
    manager: ModelManager
    registry: ModelRegistry
    gpus: GpuReader
    model_api: bool
    max_request_bytes: int

    async def models(self, request: HttpRequest) -> HttpResponse:
        """/models[/{model}[/{version}[/set-default|/batches]]], and /models/{model}/batches."""
        match request.segments[1:]:
            case []:
                return await self._dispatch(request, GET=self._list, POST=self._register)
            case [_, _, "set-default"]:
                return await self._dispatch(request, PUT=self._set_default)
            case [_, _, "batches"]:
                return await self._dispatch(request, GET=self._batches)
            case [name, "batches"] if not has_version(self.registry, name, "batches"):
                request.segments = [*request.segments[:2], *request.segments[3:]]
                return await self._dispatch(request, GET=self._batches)
            case [_] | [_, _]:
                return await self._dispatch(
                    request, GET=self._describe, PUT=self._change, DELETE=self._unregister
                )
        raise RouteNotFound

    async def kserve_model(self, request: HttpRequest) -> HttpResponse:
        """/v1/models/{model}: ready means here that it has workers, loaded or not."""
        match request.segments:
            case [_, "models", name]:
                if request.method != "GET":
                    raise MethodNotAllowed
                workers = self.registry.find(name).workers
                return json_response({"name": name, "ready": len(workers) > 0})
        raise RouteNotFound

    async def _dispatch(self, request: HttpRequest, **by_method: Serve) -> HttpResponse:
        if request.method == "OPTIONS":
            return self._describe_api(request)
        serve = by_method.get(request.method)
        if serve is None:
            raise MethodNotAllowed
        return await serve(request)

    def _describe_api(self, request: HttpRequest) -> HttpResponse:
        if len(request.segments) == 1:
            return json_response(describe_listener(["Management"]))
        _, name, *rest = request.segments
        self.registry.find(name, rest[0] if rest else None)
        return json_response(describe_model_management(name))

    async def _list(self, request: HttpRequest) -> HttpResponse:
        query = query_parameters(request)
        limit = query.integer("limit", _MAX_LISTED)
        if not 0 <= limit <= _MAX_LISTED:
            limit = _MAX_LISTED
        first = max(0, query.integer("next_page_token", 0))
        last = first + limit
        urls = {load.name: load.url for load in self.registry.failed}
        urls |= {model.name: model.archive.url for model in self.registry.defaults()}
        next_page = str(last) if last <= len(urls) else None
        page = [{"modelName": name, "modelUrl": urls[name]} for name in sorted(urls)[first:last]]
        return json_response({"nextPageToken": next_page, "models": page})

    async def _describe(self, request: HttpRequest) -> HttpResponse:
        name, version = _model_of(request)
        is_all = version == "all"
        failed = self.registry.failed.find(name, None if is_all else version)
        try:
            if is_all:
                found = await self._described(self.registry.versions(name))
                return json_response([*found, *map(describe_failed, failed)])
            model = self.registry.find(name, version)
        except (ModelNotFound, VersionNotFound):
            if not failed:
                raise
            return json_response([describe_failed(load) for load in failed])
        customized = None
        if query_parameters(request).flag("customized", default=False):
            input_ = await read_input(request, self.max_request_bytes, {})
            customized = await customized_metadata(model, input_)
        return json_response(await self._described([model], customized))

    async def _described(
        self, models: Sequence[ModelVersion], customized: Any = None
    ) -> list[dict[str, Any]]:
        gpus = await self.gpus.read() if any(map(uses_gpus, models)) else ()
        return [describe(model, gpus, customized) for model in models]

    async def _register(self, request: HttpRequest) -> HttpResponse:
        self._check_model_api()
        registration = await read_registration(request, self.max_request_bytes)
        model = await self.manager.register(registration)
        workers = model.workers.min_workers
        if workers and not registration.synchronous:
            return json_response({"status": _IN_PROGRESS}, status=202)
        status = f'Model "{model.name}" Version: {model.version} registered with {workers} initial '
        if workers:
            return json_response({"status": f"{status}workers"})
        hint = "Use scale workers API to add workers for the model."
        return json_response({"status": f"{status}workers. {hint}"})

    async def _batches(self, request: HttpRequest) -> HttpResponse:
        model = self.registry.find(*_model_of(request))
        batches = model.batcher.history.as_documents()
        names = {"modelName": model.name, "modelVersion": model.version}
        return json_response({**names, "batches": batches})

    async def _change(self, request: HttpRequest) -> HttpResponse:
        """Workers, batching, or both; all of it is looked at before anything is changed."""
        query = query_parameters(request)
        name, version = _model_of(request)
        version = version or query.text("model_version") or None
        changes = changed_settings(query)
        is_scaled = not changes or query.has("min_worker") or query.has("max_worker")
        limits = read_worker_limits(query, strict=bool(changes)) if is_scaled else (0, 0)
        if changes:
            model = await self.manager.reconfigure(name, version, changes)
            if not is_scaled:
                batching = format_settings(model.settings)
                status = f"Batching updated for model: {name}{_suffix(version)}: {batching}"
                return json_response({"status": status})
        synchronous = query.flag("synchronous", default=False)
        return await self._scale(name, version, *limits, synchronous=synchronous)

    async def _scale(
        self, name: str, version: str | None, low: int, high: int, *, synchronous: bool
    ) -> HttpResponse:
        model = await self.manager.scale(name, version, low, high, synchronous=synchronous)
        if not synchronous:
            return json_response({"status": _IN_PROGRESS}, status=202)
        if model.workers.ready < low:  # those that were there before may have failed
            return json_response({"status": "Workers scaling in progress..."}, status=206)
        status = f"Workers scaled to {low} for model: {name}{_suffix(version)}"
        return json_response({"status": status})

    async def _set_default(self, request: HttpRequest) -> HttpResponse:
        _, name, version, _ = request.segments
        await self.manager.set_default(name, version)
        return json_response(
            {"status": f'Default version successfully updated for model "{name}" to "{version}"'}
        )

    async def _unregister(self, request: HttpRequest) -> HttpResponse:
        self._check_model_api()
        name, version = _model_of(request)
        await self.manager.unregister(name, version)
        return json_response({"status": f'Model "{name}" unregistered'})

    def _check_model_api(self) -> None:
        if not self.model_api:
            raise MethodNotAllowed


def _model_of(request: HttpRequest) -> tuple[str, str | None]:
    _, name, *version = request.segments
    return name, version[0] if version else None


def _suffix(version: str | None) -> str:
    return f", version: {version}" if version else ""
