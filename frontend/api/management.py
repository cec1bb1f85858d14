"""The management listener: register, list, describe, scale, set the default, unregister; tokens."""

import json
import logging
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from marserve.frontend.api.auth import TokenStore
from marserve.frontend.api.describe import customized_metadata, describe
from marserve.frontend.api.door import Route, Visit
from marserve.frontend.api.inputs import read_body, read_input
from marserve.frontend.api.openapi import describe_listener, describe_model_management
from marserve.frontend.api.outputs import Answer, json_answer
from marserve.frontend.configuration.values import MOST_WORKERS
from marserve.frontend.errors import BadRequest, MethodNotAllowed, RouteNotFound
from marserve.frontend.models.manager import ModelManager, Registration
from marserve.frontend.models.registry import ModelRegistry, ModelVersion
from marserve.frontend.models.settings import MAX_NUMBER, Requested
from marserve.frontend.version import __version__

logger = logging.getLogger(__name__)

_MOST_LISTED = 100
_RUNTIMES = ("python", "python3", "LSP")
_MOST_DIGITS = 20
_IN_PROGRESS = "Processing worker updates..."
_DESCRIBE = {"describe": "True"}  # what a handler looks at

Serve = Callable[[Visit], Awaitable[Answer]]


def management_routes(
    manager: ModelManager,
    registry: ModelRegistry,
    *,
    tokens: TokenStore | None,
    model_api: bool,
    max_request_bytes: int,
) -> Mapping[str, Route]:
    """The routes of the management listener.

    Args:
        manager: Changes the models.
        registry: Knows them.
        tokens: Keys that can be renewed; None when authorization is off.
        model_api: Whether models may be registered and unregistered.
        max_request_bytes: Longest body of a registration.
    """
    management = _Management(manager, registry, model_api, max_request_bytes)
    routes = {
        "models": Route(management.models, "management"),
        "v1": Route(management.kserve_model, "management"),
    }
    if tokens is not None:
        routes["token"] = Route(_renewal(tokens))  # guarded by the API key, which it checks itself
    return routes


def _renewal(tokens: TokenStore) -> Serve:
    async def renew(visit: Visit) -> Answer:
        kind = _query(visit).text("type") or None
        tokens.renew(kind, visit.request.headers.get("Authorization"))
        return Answer(200, b"\n", {"content-type": "application/json"})

    return renew


class _Management:
    def __init__(
        self,
        manager: ModelManager,
        registry: ModelRegistry,
        model_api: bool,
        max_request_bytes: int,
    ) -> None:
        self._manager = manager
        self._registry = registry
        self._model_api = model_api
        self._max_request_bytes = max_request_bytes

    async def models(self, visit: Visit) -> Answer:
        """/models[/{model}[/{version}[/set-default]]]."""
        _, *path = visit.segments
        if len(path) == 3 and path[2] == "set-default":
            return await self._dispatch(visit, PUT=self._set_default)
        if len(path) > 2:
            raise RouteNotFound
        if not path:
            return await self._dispatch(visit, GET=self._list, POST=self._register)
        return await self._dispatch(
            visit, GET=self._describe, PUT=self._scale, DELETE=self._unregister
        )

    async def kserve_model(self, visit: Visit) -> Answer:
        """/v1/models/{model}: ready means here that it has workers, loaded or not."""
        match visit.segments:
            case [_, "models", name]:
                if visit.request.method != "GET":
                    raise MethodNotAllowed
                workers = self._registry.find(name).workers
                return json_answer({"name": name, "ready": len(workers) > 0})
        raise RouteNotFound

    async def _dispatch(self, visit: Visit, **by_method: Serve) -> Answer:
        if visit.request.method == "OPTIONS":
            return self._describe_api(visit)
        serve = by_method.get(visit.request.method)
        if serve is None:
            raise MethodNotAllowed
        return await serve(visit)

    def _describe_api(self, visit: Visit) -> Answer:
        if len(visit.segments) == 1:
            return json_answer(describe_listener(["Management"], __version__))
        name, version = visit.segments[1], visit.segments[2] if len(visit.segments) > 2 else None
        self._registry.find(name, version)
        return json_answer(describe_model_management(name, __version__))

    async def _list(self, visit: Visit) -> Answer:
        query = _query(visit)
        limit = query.whole("limit", _MOST_LISTED)
        if not 0 <= limit <= _MOST_LISTED:
            limit = _MOST_LISTED
        first = max(0, query.whole("next_page_token", 0))
        models = self._registry.defaults()
        last = first + limit
        return json_answer(
            {
                "nextPageToken": str(last) if last <= len(models) else None,
                "models": [
                    {"modelName": model.name, "modelUrl": model.archive.url}
                    for model in models[first:last]
                ],
            }
        )

    async def _describe(self, visit: Visit) -> Answer:
        name, version = _model_of(visit)
        if version == "all":
            found = self._registry.versions(name)
            return json_answer([await describe(model) for model in found])
        model = self._registry.find(name, version)
        customized = None
        if _query(visit).flag("customized", default=False):
            question = await read_input(visit.request, visit.id, self._max_request_bytes, _DESCRIBE)
            customized = await customized_metadata(model, question)
        return json_answer([await describe(model, customized)])

    async def _register(self, visit: Visit) -> Answer:
        self._check_model_api()
        registration = _registration(await self._parameters(visit))
        model = await self._manager.register(registration)
        workers = model.workers.min_workers
        if workers and not registration.synchronous:
            return json_answer({"status": _IN_PROGRESS}, status=202)
        status = f'Model "{model.name}" Version: {model.version} registered with {workers} initial '
        if workers:
            return json_answer({"status": f"{status}workers"})
        hint = "Use scale workers API to add workers for the model."
        return json_answer({"status": f"{status}workers. {hint}"})

    async def _scale(self, visit: Visit) -> Answer:
        query = _query(visit)
        name, version = _model_of(visit)
        version = version or query.text("model_version") or None
        low = query.whole("min_worker", 1)
        high = query.whole("max_worker", low)
        if low < 0:
            raise BadRequest("min_worker cannot be less than 0.")
        _check_workers(low)
        if high < low:
            raise BadRequest("max_worker cannot be less than min_worker.")
        synchronous = query.flag("synchronous", default=False)
        model = await self._manager.scale(name, version, low, high, synchronous=synchronous)
        if not synchronous:
            return json_answer({"status": _IN_PROGRESS}, status=202)
        if model.workers.ready < low:  # those that were there before may have failed
            return json_answer({"status": "Workers scaling in progress..."}, status=206)
        suffix = f", version: {version}" if version else ""
        return json_answer({"status": f"Workers scaled to {low} for model: {name}{suffix}"})

    async def _set_default(self, visit: Visit) -> Answer:
        _, name, version, _ = visit.segments
        await self._manager.set_default(name, version)
        return json_answer(
            {"status": f'Default version successfully updated for model "{name}" to "{version}"'}
        )

    async def _unregister(self, visit: Visit) -> Answer:
        self._check_model_api()
        name, version = _model_of(visit)
        model: ModelVersion = await self._manager.unregister(name, version)
        return json_answer({"status": f'Model "{model.name}" unregistered'})

    def _check_model_api(self) -> None:
        if not self._model_api:
            raise MethodNotAllowed

    async def _parameters(self, visit: Visit) -> "_Parameters":
        """Of a registration: a JSON body, or the query."""
        content_type = visit.request.headers.get("content-type", "")
        body = await read_body(visit.request, self._max_request_bytes)
        if content_type.partition(";")[0].strip().lower() != "application/json":
            return _query(visit)
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"The body is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise BadRequest("The body is not a JSON object.")
        return _Parameters(document)


class _Parameters:
    """Named values of a request, as text from a query or as JSON values.

    As in TorchServe a number that is none counts as not given; the log tells.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, name: str) -> str:
        value = self._values.get(name)
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def whole(self, name: str, default: int) -> int:
        value = self._values.get(name)
        if value is None:
            return default
        try:
            number = int(str(value)[:_MOST_DIGITS])
        except ValueError:
            number = MAX_NUMBER + 1
        if abs(number) > MAX_NUMBER:
            shown = reprlib.repr(value)
            logger.warning("Parameter %s=%s is no integer, %d is taken.", name, shown, default)
            return default
        return number

    def flag(self, name: str, *, default: bool) -> bool:
        value = self._values.get(name)
        return default if value is None else str(value).lower() == "true"

    def at_least(self, name: str, minimum: int) -> int | None:
        """A number, None when absent or smaller (TorchServe's clients send -1 for "unset")."""
        value = self.whole(name, minimum - 1)
        return None if value < minimum else value


def _query(visit: Visit) -> _Parameters:
    query = visit.request.raw_path.partition("?")[2].partition("#")[0]
    # Of several with one name the first counts.
    return _Parameters(dict(reversed(parse_qsl(query, keep_blank_values=True))))


def _model_of(visit: Visit) -> tuple[str, str | None]:
    _, name, *version = visit.segments
    return name, version[0] if version else None


def _check_workers(count: int) -> None:
    if count > MOST_WORKERS:
        raise BadRequest(f"No model can have {count} workers; the most are {MOST_WORKERS}.")


def _registration(parameters: _Parameters) -> Registration:
    if not parameters.has("url"):
        raise BadRequest("Parameter url is required.")
    runtime = parameters.text("runtime")
    if runtime and runtime not in _RUNTIMES:
        raise BadRequest(f"Invalid RuntimeType value: {runtime}")
    _check_workers(parameters.whole("initial_workers", 0))
    delay_ms = parameters.at_least("max_batch_delay", 0)
    return Registration(
        url=parameters.text("url"),
        model_name=parameters.text("model_name"),
        handler=parameters.text("handler"),
        runtime=runtime,
        synchronous=parameters.flag("synchronous", default=True),
        s3_sse_kms=parameters.flag("s3_sse_kms", default=False),
        requested=Requested(
            batch_size=parameters.at_least("batch_size", 1),
            max_batch_delay=None if delay_ms is None else delay_ms / 1000,
            initial_workers=parameters.at_least("initial_workers", 0),
            response_timeout=parameters.at_least("response_timeout", 1),
            startup_timeout=parameters.at_least("startup_timeout", 1),
        ),
    )
