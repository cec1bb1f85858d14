"""The HTTP listeners of the server, their routes, guards and limits.

Equal addresses share a listener. A listener that serves inference and management serves /metrics
too, as in TorchServe, in addition to the metrics listener.
"""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import parse_qs

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.configuration.addresses import Address
from marserve.frontend.http.forms import FormLimits
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.listeners import BoundListener, Listener, TlsHandshake, bind_listener
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, common_headers, content_response
from marserve.frontend.http.router import ANY_OTHER, Route, Router
from marserve.frontend.operations.services import Services
from marserve.frontend.rest.api_description import description_routes
from marserve.frontend.rest.dashboard import dashboard_routes
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.kserve import kserve_platform_routes, kserve_routes
from marserve.frontend.rest.loggers import logger_routes
from marserve.frontend.rest.management import management_routes
from marserve.frontend.rest.open_inference import repository_routes
from marserve.frontend.rest.shared_routes import shared_routes
from marserve.frontend.rest.vertex import vertex_routes
from marserve.frontend.rest.workflows import workflow_inference_routes, workflow_management_routes
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.usage import Usage
from marserve.frontend.serving.engine_metrics import engine_lines, engine_pages
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.exposition import (
    CONTENT_TYPE,
    OPENMETRICS_TYPE,
    prefers_openmetrics,
    render,
    render_openmetrics,
)
from marserve.frontend.telemetry.metrics import REQUEST_COUNTERS, Metrics
from marserve.frontend.telemetry.series import WatchedGauge

# For connections that still write when every request has been answered.
_CLOSE_SECONDS = 2.0
_FOR_OPERATORS = ("Management", "Metrics", "Management and Metrics")


@dataclass(frozen=True)
class HttpEndpoints:
    """The HTTP listeners of a server."""

    services: Services
    tls: ssl.SSLContext | None  # None: no listener uses https

    async def bind(self, opened: AsyncExitStack) -> list[BoundListener]:
        """Bind all listeners, inference first; OSError if one cannot be bound."""
        usages: dict[str, Usage] = {}
        watch_bytes(self.services.metrics, usages)
        listeners = self._listeners()
        limits = self._limits(len(listeners))
        return [await self._bind(opened, each, limits, usages) for each in listeners]

    def _listeners(self) -> Sequence[Listener]:
        """Return each listener with its routes; equal addresses share one."""
        services, config, registry = self.services, self.services.config, self.services.registry
        limit, open_inference = config.max_request_size, config.ts_open_inference_protocol
        of_models = inference_routes(registry, limit)
        of_workflows = services.workflows.workflows
        inference: Mapping[str, Route] = {
            **of_models,
            **workflow_inference_routes(of_workflows, limit, of_models[ANY_OTHER]),
            **kserve_routes(registry, limit, open_inference=open_inference),
        }
        setup = config.platform.setup
        inference = vertex_routes(
            registry, limit, inference, predict=setup.predict_route, health=setup.health_route
        )
        management = {
            **management_routes(
                services.management, tokens=services.tokens, max_request_bytes=limit
            ),
            **workflow_management_routes(services.workflows, limit),
            **(repository_routes(services.repository()) if open_inference else {}),
            **logger_routes(),
            **dashboard_routes(services.dashboard, services.requests, registry, limit),
        }
        listeners = [
            Listener("Inference", config.inference_address, inference, setup.when_ready),
            Listener("Management", config.management_address, management),
        ]
        if config.enable_metrics_api:
            legacy = config.metrics_mode == "legacy"
            metrics = metrics_routes(services.metrics, registry, legacy=legacy)
            listeners += [
                Listener("Metrics", address, metrics) for address in config.metrics_addresses
            ]
        shared = [self._described(listener) for listener in self._share_addresses(listeners)]
        return [*shared, *self._of_platform(inference)]

    def _share_addresses(self, listeners: Iterable[Listener]) -> list[Listener]:
        """Merge the listeners with equal addresses."""
        shared: list[Listener] = []
        for listener in listeners:
            for index, first in enumerate(shared):
                if first.address == listener.address and first.address.is_fixed:
                    name = f"{first.name} and {listener.name}"
                    routes = shared_routes(first.routes, listener.routes, self.services.registry)
                    shared[index] = replace(first, name=name, routes=routes)
                    break
            else:
                shared.append(listener)
        return shared

    def _of_platform(self, inference: Mapping[str, Route]) -> Iterator[Listener]:
        """Yield the listeners of the platform; only KServe has any."""
        config = self.services.config
        platform, limit = config.platform, config.max_request_size
        for address in platform.setup.inference:
            plain = self._described(Listener("Inference", address, inference, when_ready=True))
            own = kserve_platform_routes(self.services.registry, limit, plain.routes[""])
            yield replace(plain, name=platform.title, routes={**plain.routes, **own})

    def _described(self, listener: Listener) -> Listener:
        open_inference = self.services.config.ts_open_inference_protocol
        about = description_routes(listener.name, open_inference=open_inference)
        return replace(listener, routes={**about, **listener.routes})

    async def _bind(
        self,
        opened: AsyncExitStack,
        listener: Listener,
        limits: ConnectionLimits,
        usages: dict[str, Usage],
    ) -> BoundListener:
        """Bind a listener; the connections of its clients end with the server."""
        services, config = self.services, self.services.config
        # Web pages cannot connect to a unix socket.
        on_network = isinstance(listener.address, Address)
        router = Router(
            listener.routes,
            guard=Guard.of(config, services.tokens, browsers=on_network),
            access_log=services.access_log,
            time_lines=services.requests.lines,
            sampling=services.sampling,
            common_headers=common_headers(
                {
                    "access-control-allow-origin": config.cors_allowed_origin,
                    "access-control-allow-methods": config.cors_allowed_methods,
                    "access-control-allow-headers": config.cors_allowed_headers,
                }
            ),
        )
        on_limit = partial(services.count_limit, listener.name)
        long_work = services.long_work_of(is_inference=listener.name not in _FOR_OPERATORS)
        clients = HttpServer(router, limits, on_limit=on_limit, long_work=long_work)
        usages[listener.name] = clients.usage
        opened.push_async_callback(clients.close, _CLOSE_SECONDS)
        make: Callable[[], asyncio.Protocol] = clients
        if self.tls is not None and listener.address.url.startswith("https:"):
            handshakes = await opened.enter_async_context(BackgroundTasks())
            make = partial(TlsHandshake, clients, self.tls, handshakes)
        return await bind_listener(opened, listener, make, clients.stop)

    def _limits(self, listeners: int) -> ConnectionLimits:
        config = self.services.config
        max_bytes, max_client_bytes = self.services.byte_limits()
        return ConnectionLimits(
            head_timeout=config.request_head_timeout,
            body_timeout=config.request_body_timeout,
            body_rate=config.request_body_rate,
            write_timeout=config.response_write_timeout,
            write_rate=config.response_write_rate,
            max_connections=config.max_connections,
            max_client_connections=config.max_client_connections,
            max_bytes_in_flight=max_bytes,
            max_client_bytes_in_flight=max_client_bytes,
            forms=FormLimits(config.max_form_parts, config.max_part_header_size),
            listeners=listeners,
            has_grpc=config.enable_grpc,
        )


def metrics_routes(
    metrics: Metrics, registry: ModelRegistry, *, legacy: bool = False
) -> Mapping[str, Route]:
    """Return the route of the metrics listener; ``legacy`` omits the metrics of the log."""

    def is_on_page(name: str) -> bool:
        return not legacy or name in REQUEST_COUNTERS or name.startswith("marserve_")

    async def show(request: HttpRequest) -> HttpResponse:
        names = parse_qs(request.target.partition("?")[2]).get("name[]", ())
        of_engines = await request.memory.run(engine_lines(await engine_pages(registry), names))
        is_open = prefers_openmetrics(request.headers.get("accept", ""))
        steps = render_openmetrics if is_open else render
        page = steps(metrics.registry, names, is_on_page, of_engines)
        media_type = OPENMETRICS_TYPE if is_open else CONTENT_TYPE
        return content_response(page, {"content-type": media_type})

    return {"metrics": Route(show)}


def watch_bytes(metrics: Metrics, usages: Mapping[str, Usage]) -> None:
    """Add the gauge of the bytes that each listener, by its name, keeps in memory."""

    def in_flight() -> Iterable[tuple[Sequence[str], float]]:
        return [((name, metrics.hostname), usage.bytes) for name, usage in usages.items()]

    text = "Bytes of requests and answers that the clients of a listener keep in memory"
    labels = ("listener", "hostname")
    metrics.registry.watch(WatchedGauge("marserve_bytes_in_flight", text, labels, in_flight))
