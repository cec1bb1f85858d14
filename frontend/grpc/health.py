"""grpc.health.v1: whether the server, or a model, can answer now.

The server (the empty name, and the names of its services) is SERVING while GET /ready says 200. A
model is asked for as ``NAME`` or ``NAME/VERSION``. Like GET /ready, it needs no key: probes have
none. A server about to stop is NOT_SERVING, and so are its models.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from marserve.frontend.errors import ModelNotFound, VersionNotFound
from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.messages import POOL, Answers, Message, load_proto
from marserve.frontend.models.readiness import is_ready, is_server_ready
from marserve.frontend.models.registry import ModelRegistry

_HEALTH = load_proto("grpc/health/v1/health.proto")
_Response = _HEALTH.messages.HealthCheckResponse
# How often a watched state is looked at; watchers are few.
_SECONDS_BETWEEN_LOOKS = 0.5


def health_service(registry: ModelRegistry) -> Service:
    """The service, for any listener."""
    return Service(_HEALTH.services["Health"], _Health(registry), key=None)


@dataclass(frozen=True)
class _Health:
    registry: ModelRegistry

    async def check(self, request: Message, _call: Call) -> Message:
        """The state now; NOT_FOUND if nothing has that name."""
        return _Response(status=self._state(request.service))

    async def watch(self, request: Message, call: Call) -> Answers:
        """The state now and whenever it changes, until the client leaves or the server stops."""
        last = None
        while True:
            try:
                state = self._state(request.service)
            except (ModelNotFound, VersionNotFound):
                state = _Response.SERVICE_UNKNOWN
            if state != last:
                yield _Response(status=state)
                last = state
            if call.stopping.is_set():
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_BETWEEN_LOOKS):
                    await call.stopping.wait()

    def _state(self, name: str) -> int:
        registry = self.registry
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
