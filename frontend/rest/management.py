"""The management listener: register, list, describe, scale, set the default, unregister; tokens."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from marserve.frontend.errors import MethodNotAllowed, RouteNotFound
from marserve.frontend.http.request_bodies import read_input
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response
from marserve.frontend.http.router import Route
from marserve.frontend.operations.management import MAX_LISTED, ModelManagement, Outcome
from marserve.frontend.rest.api_description import describe_listener, describe_model_management
from marserve.frontend.rest.parameters import query_parameters, read_parameters
from marserve.frontend.security.given_tokens import Tokens
from marserve.frontend.serving.registry import ModelRegistry

Serve = Callable[[HttpRequest], Awaitable[HttpResponse]]


def management_routes(
    operations: ModelManagement, *, tokens: Tokens | None, max_request_bytes: int
) -> Mapping[str, Route]:
    """Return the routes of the management listener; ``tokens`` is None without keys."""
    management = _Management(operations, max_request_bytes)
    routes = {
        "models": Route(management.models, "management"),
        "v1": Route(management.kserve_model, "management"),
        "catalog": Route(management.catalog, "management"),
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
    operations: ModelManagement
    max_request_bytes: int

    @property
    def registry(self) -> ModelRegistry:
        return self.operations.registry

    async def models(self, request: HttpRequest) -> HttpResponse:
        match request.segments[1:]:
            case []:
                return await self._dispatch(request, GET=self._list, POST=self._register)
            case [_, _, "set-default"]:
                return await self._dispatch(request, PUT=self._set_default)
            case [_, _, "batches"]:
                return await self._dispatch(request, GET=self._batches)
            case [name, "batches"] if not self.registry.has(name, "batches"):
                request.segments = [*request.segments[:2], *request.segments[3:]]
                return await self._dispatch(request, GET=self._batches)
            case [_] | [_, _]:
                return await self._dispatch(
                    request, GET=self._describe, PUT=self._change, DELETE=self._unregister
                )
        raise RouteNotFound

    async def catalog(self, request: HttpRequest) -> HttpResponse:
        if len(request.segments) > 1:
            raise RouteNotFound
        if request.method != "GET":
            raise MethodNotAllowed
        return json_response(self.operations.catalog())

    async def kserve_model(self, request: HttpRequest) -> HttpResponse:
        """The answer of KServe: ready if the model has workers, loaded or not."""
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
        limit, first = query.integer("limit", MAX_LISTED), query.integer("next_page_token", 0)
        return json_response(self.operations.list_models(limit, first))

    async def _describe(self, request: HttpRequest) -> HttpResponse:
        name, version = _model_of(request)
        asked = None
        if query_parameters(request).flag("customized", default=False):
            asked = await read_input(request, self.max_request_bytes, {})
        described = await self.operations.describe(name, version, request.memory, asked)
        return json_response(described)

    async def _register(self, request: HttpRequest) -> HttpResponse:
        self.operations.check_model_api()  # before the body is read
        parameters = await read_parameters(request, self.max_request_bytes)
        return outcome_response(await self.operations.register(parameters))

    async def _batches(self, request: HttpRequest) -> HttpResponse:
        model = self.registry.find(*_model_of(request))
        batches = model.batcher.history.documents()
        names = {"modelName": model.name, "modelVersion": model.version}
        return json_response({**names, "batches": batches})

    async def _change(self, request: HttpRequest) -> HttpResponse:
        parameters = await read_parameters(request, self.max_request_bytes, may_be_empty=True)
        return outcome_response(await self.operations.change(*_model_of(request), parameters))

    async def _set_default(self, request: HttpRequest) -> HttpResponse:
        _, name, version, _ = request.segments
        return outcome_response(await self.operations.set_default(name, version))

    async def _unregister(self, request: HttpRequest) -> HttpResponse:
        return outcome_response(await self.operations.unregister(*_model_of(request)))


def outcome_response(outcome: Outcome) -> HttpResponse:
    """Return the response to a change."""
    document: dict[str, Any] = {"status": outcome.sentence}
    if outcome.warnings:  # else the body is TorchServe's
        document["warnings"] = outcome.warnings
    return json_response(document, status=outcome.status)


def _model_of(request: HttpRequest) -> tuple[str, str | None]:
    _, name, *version = request.segments
    return name, version[0] if version else None
