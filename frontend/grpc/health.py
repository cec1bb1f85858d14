"""grpc.health.v1: whether the server, or a model, can answer now.

The server (the empty name, and the names of its services) is SERVING while GET /ready says 200. A
model is asked for as ``NAME`` or ``NAME/VERSION``. Like GET /ready, it needs no key: probes have
none. A server about to stop is NOT_SERVING, and so are its models.
"""

import asyncio
import contextlib
from collections.abc import Iterator

from marserve.frontend.errors import ModelNotFound, VersionNotFound
from marserve.frontend.grpc.calls import Call, Service
from marserve.frontend.grpc.messages import POOL, Answers, Message, load_proto
from marserve.frontend.models.readiness import is_ready, is_server_ready
from marserve.frontend.models.registry import ModelRegistry

_HEALTH = load_proto("grpc/health/v1/health.proto")
_Response = _HEALTH.messages.HealthCheckResponse
# How often the server looks for changes while streams watch, and how many of these are woken at a
# time: other requests are answered in between.
_SECONDS_BETWEEN_LOOKS = 0.5
_WOKEN_AT_A_TIME = 50


def health_service(registry: ModelRegistry) -> Service:
    """The service, for any listener."""
    return Service(_HEALTH.services["Health"], _Health(registry), key=None)


class _Health:
    def __init__(self, registry: ModelRegistry) -> None:
        self._registry = registry
        self._changes = _Changes(registry)

    async def check(self, request: Message, _call: Call) -> Message:
        """The state now; NOT_FOUND if nothing has that name."""
        return _Response(status=self._state(request.service))

    async def watch(self, request: Message, call: Call) -> Answers:
        """The state now and whenever it changes, until the client leaves or the server stops."""
        last = None
        with self._changes.followed(call.stopping):
            while True:
                seen = self._changes.count
                try:
                    state = self._state(request.service)
                except (ModelNotFound, VersionNotFound):
                    state = _Response.SERVICE_UNKNOWN
                if state != last:
                    yield _Response(status=state)
                    last = state
                if call.stopping.is_set():
                    return
                await self._changes.wait(seen)

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


class _Changes:
    """Changes of the readiness of the server and of its models.

    One task looks for them, while there are streams that watch; it wakes these only after a change.

    Attributes:
        count: The number of changes so far.
    """

    def __init__(self, registry: ModelRegistry) -> None:
        self.count = 0
        self._registry = registry
        self._followers = 0
        self._last: object = None
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def followed(self, stopping: asyncio.Event) -> Iterator[None]:
        """Look for changes within the block, or until the server stops, which counts as one."""
        self._followers += 1
        if self._task is None or self._task.done():
            self._last = self._states()
            self._task = asyncio.create_task(self._run(stopping))
        try:
            yield
        finally:
            self._followers -= 1

    async def wait(self, seen: int) -> None:
        """Return when there are more changes than those ``seen``; no deadline."""
        if seen == self.count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting[waiter] = None
            try:
                await waiter
            finally:
                self._waiting.pop(waiter, None)

    async def _run(self, stopping: asyncio.Event) -> None:
        while self._followers and not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SECONDS_BETWEEN_LOOKS):
                    await stopping.wait()
            before, self._last = self._last, self._states()
            if before != self._last or stopping.is_set():
                self.count += 1
                await self._wake()

    async def _wake(self) -> None:
        for number, waiter in enumerate(tuple(self._waiting), 1):
            if not waiter.done():
                waiter.set_result(None)
            if not number % _WOKEN_AT_A_TIME:
                await asyncio.sleep(0)

    def _states(self) -> object:
        registry = self._registry
        models = {(model.name, model.version): is_ready(registry, model) for model in registry}
        defaults = [model.version for model in registry.defaults()]
        return is_server_ready(registry), models, defaults
