"""grpc.health.v1: whether the server or a model can answer now.

The server (the empty name, and the names of its services) is SERVING while GET /ready answers 200.
The name of a model is ``NAME`` or ``NAME/VERSION``. Like GET /ready, the service needs no key.
"""

import asyncio
import contextlib
import random

from marserve.frontend.errors import ModelNotFound, VersionNotFound
from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.messages import POOL, Answers, Message, load_proto
from marserve.frontend.serving.readiness import is_ready, is_server_ready
from marserve.frontend.serving.registry import ModelRegistry

_HEALTH = load_proto("grpc/health/v1/health.proto")
_Response = _HEALTH.messages.HealthCheckResponse
# The server checks for changes at this interval while streams watch. After a change, streams check
# at random times, so that other requests are answered in between.
_SECONDS_BETWEEN_CHECKS = 0.5
_SECONDS_PER_STREAM = 1e-4


def health_service(registry: ModelRegistry) -> Service:
    """Return the service of one listener."""
    return Service(_HEALTH.services["Health"], _Health(registry), key=None)


class _Health:
    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._watching = 0
        #: Set at the next change; one task detects it while streams watch.
        self._change = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    async def check(self, request: Message, _call: Call) -> Message:
        return _Response(status=self._state(request.service))

    async def watch(self, request: Message, call: Call) -> Answers:
        """Send the state now and after each change, until the client leaves or the server stops."""
        last = None
        self._watching += 1
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(self._states(), call.stopping))
        try:
            while True:
                change = self._change
                try:
                    state = self._state(request.service)
                except (ModelNotFound, VersionNotFound):
                    state = _Response.SERVICE_UNKNOWN
                if state != last:
                    yield _Response(status=state)
                    last = state
                if call.stopping.is_set():
                    return
                await change.wait()  # no deadline: the client ends it
                await asyncio.sleep(random.random() * _SECONDS_PER_STREAM * self._watching)  # noqa: S311 - no secret
        finally:
            self._watching -= 1

    async def _look(self, before: object, stopping: asyncio.Event) -> None:
        """Set the event of each change, while streams watch and until the server stops."""
        while self._watching and not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_BETWEEN_CHECKS):
                    await stopping.wait()
            now = self._states()
            if now != before or stopping.is_set():
                self._change.set()
                before, self._change = now, asyncio.Event()

    def _states(self) -> object:
        registry = self._registry
        models = {(model.name, model.version): is_ready(registry, model) for model in registry}
        defaults = [model.version for model in registry.defaults()]
        return is_server_ready(registry), models, defaults

    def _state(self, name: str) -> int:
        registry = self._registry
        if not name or _is_service(name):
            is_serving = is_server_ready(registry)
        else:
            model, _, version = name.partition("/")
            is_serving = is_ready(registry, registry.find(model, version or None))
        state: int = _Response.SERVING if is_serving else _Response.NOT_SERVING
        return state


def _is_service(name: str) -> bool:
    try:
        POOL.FindServiceByName(name)
    except KeyError:
        return False
    return True
