"""Models that answer with what they were given, and an inference listener that asks them."""

import asyncio
import json
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import fakes
import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.options import Batching
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.router import Router
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.kserve import kserve_routes
from marserve.frontend.security.guard import Guard
from marserve.frontend.serving.model_version import Origin
from marserve.frontend.serving.predict_request import PredictRequest
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics

MAX_BYTES = 1000
LIMITS = ConnectionLimits(head_timeout=60.0)

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Listener:
    """A listener that is open.

    Attributes:
        server: Deals with its clients.
        metrics: What was counted.
    """

    server: HttpServer
    metrics: Metrics
    _sockets: asyncio.Server
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def connect(self) -> Client:
        """Come as a client."""
        client = await asyncio.open_connection(*self._sockets.sockets[0].getsockname())
        self._writers.append(client[1])
        await fakes.drain_loop()
        return client

    async def close(self) -> None:
        """At the end all clients leave."""
        for writer in self._writers:
            writer.transport.abort()
        self._sockets.close()
        await self.server.close(0.5)
        await fakes.drain_loop()


@pytest.fixture
def listen(run):
    """Run a test that gets a listener with some routes, in virtual time."""

    async def work(test, routes, limits=LIMITS, *, fast_path=True):
        loop = asyncio.get_running_loop()
        metrics = Metrics("host")
        log = AccessLog(loop, metrics)
        router = Router(routes, guard=Guard(None), access_log=log, common_headers="")
        server = HttpServer(router, limits, fast_path=fast_path)
        sockets = await loop.create_server(server, "127.0.0.1", 0)
        listener = Listener(server, metrics, sockets)
        try:
            await test(listener)
        finally:
            await listener.close()
            log.flush()

    return lambda *arguments, **options: run(work(*arguments, **options))


@dataclass
class Workers:
    """As many as are ``there``, of which so many are ready."""

    ready: int = 1
    min_workers: int = 1
    there: int = 1
    is_healthy: bool = True

    def __len__(self) -> int:
        return self.there


@dataclass
class Model:
    """Answers with its name and version and with what reached it; says why it is ``full``."""

    name: str
    version: str = "1"
    origin: Origin = field(default=Origin(""))
    workers: Workers = field(default_factory=Workers)
    settings: Any = field(
        default_factory=lambda: SimpleNamespace(batching=Batching(), stack_inputs="", openai="none")
    )
    tensors: Any = field(default_factory=dict)
    manifest: Any = field(default_factory=lambda: SimpleNamespace(envelope=""))
    archive: Any = field(
        default_factory=lambda: SimpleNamespace(contents=SimpleNamespace(openai_names=()))
    )
    created: int = 1700000000
    full: str = ""
    expected_seconds: float = 0.0
    max_rows: int = 100
    json_nan: str = "keep"

    def why_full(self, _share_in_flight: float) -> str:
        return self.full

    def check(self, _request: PredictRequest) -> None:
        """Accept all."""

    async def predict(self, request: PredictRequest) -> Prediction:
        input_, options = request.input, request.options
        document = {
            "model": self.name,
            "version": self.version,
            "by_version": request.by_version,
            "options": [options.timeout, options.priority.name],
            "parts": [[part.name, bytes(part.body).decode()] for part in input_.parts],
            "headers": {
                name: input_.headers[name]
                for name in ("url_path", "explain", "describe", "x-mine", "X-Priority")
                if name in input_.headers
            },
        }
        return Prediction(json.dumps(document).encode())


@pytest.fixture
def make_model():
    """Make a model: name, version, and how its ``workers`` are."""

    def make(name, version="1", *, at_start=False, **workers):
        return Model(name, version, Origin("", at_start=at_start), Workers(**workers))

    return make


@pytest.fixture
def registry(make_model):
    """Knows the model m, in version 1 by default and in version 2."""
    known = ModelRegistry()
    known.add(make_model("m"))
    known.add(make_model("m", "2"))
    return known  # type: ignore[no-any-return] # any: it is told of stand-ins


@pytest.fixture
def ask(registry):
    """Ask the inference listener: target, method, body, headers."""

    def answer(target, method="POST", body=b"", *headers, open_inference=False):
        kserve = kserve_routes(registry, MAX_BYTES, open_inference=open_inference)
        routes = {**inference_routes(registry, MAX_BYTES), **kserve}
        return fakes.exchange(routes, fakes.request(target, method, body, *headers))

    return answer
