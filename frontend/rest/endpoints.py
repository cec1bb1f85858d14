"""The HTTP listeners of the server, their routes, guards and limits."""

import asyncio
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.configuration.addresses import Address
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.memory import bytes_in_flight
from marserve.frontend.http.forms import FormLimits
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.listeners import (
    BoundListener,
    Listener,
    TlsHandshake,
    bind_listener,
    share_addresses,
)
from marserve.frontend.http.responses import common_headers
from marserve.frontend.http.router import ANY_OTHER, Route, Router
from marserve.frontend.operations.management import ModelManagement
from marserve.frontend.operations.open_inference_models import OpenInferenceModels
from marserve.frontend.operations.workflows import WorkflowManagement
from marserve.frontend.rest.api_description import description_routes
from marserve.frontend.rest.inference import inference_routes
from marserve.frontend.rest.kserve import kserve_platform_routes, kserve_routes
from marserve.frontend.rest.loggers import logger_routes
from marserve.frontend.rest.management import management_routes
from marserve.frontend.rest.metrics import metrics_routes
from marserve.frontend.rest.open_inference import repository_routes
from marserve.frontend.rest.shared_routes import shared_routes
from marserve.frontend.rest.vertex import vertex_routes
from marserve.frontend.rest.workflows import workflow_inference_routes, workflow_management_routes
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import Tokens
from marserve.frontend.security.usage import Usage
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.series import WatchedGauge

# For connections that still write when every request has been answered.
_CLOSE_SECONDS = 2.0


@dataclass(frozen=True)
class HttpEndpoints:
    """The HTTP listeners of a server."""

    config: Config
    registry: ModelRegistry
    management: ModelManagement
    workflows: WorkflowManagement
    metrics: Metrics
    access_log: AccessLog
    tokens: Tokens | None  # None: no keys
    tls: ssl.SSLContext | None  # None: no listener uses https

    async def bind(self, opened: AsyncExitStack) -> list[tuple[str, BoundListener]]:
        """Bind all listeners, inference first; OSError if one cannot be bound."""
        usages: dict[str, Usage] = {}
        watch_bytes(self.metrics, usages)
        listeners = self._listeners()
        limits = self._limits(len(listeners))
        return [
            (listener.name, await self._bind(opened, listener, limits, usages))
            for listener in listeners
        ]

    def _listeners(self) -> Sequence[Listener]:
        """Return each listener with its routes; equal addresses share one."""
        config, limit = self.config, self.config.max_request_size
        open_inference = config.ts_open_inference_protocol
        of_models = inference_routes(self.registry, limit)
        inference: Mapping[str, Route] = {
            **of_models,
            **workflow_inference_routes(self.workflows.workflows, limit, of_models[ANY_OTHER]),
            **kserve_routes(self.registry, limit, open_inference=open_inference),
        }
        setup = config.platform.setup
        inference = vertex_routes(
            self.registry, limit, inference, predict=setup.predict_route, health=setup.health_route
        )
        management = {
            **management_routes(self.management, tokens=self.tokens, max_request_bytes=limit),
            **workflow_management_routes(self.workflows, limit),
        }
        if open_inference:
            models = OpenInferenceModels(
                self.registry, self.management, max(1, config.default_workers_per_model)
            )
            management = {**management, **repository_routes(models)}
        metrics = metrics_routes(self.metrics, legacy=config.metrics_mode == "legacy")
        listeners = [
            Listener("Inference", config.inference_address, inference, setup.when_ready),
            Listener("Management", config.management_address, {**management, **logger_routes()}),
        ]
        if config.enable_metrics_api:
            listeners += [
                Listener("Metrics", address, metrics) for address in config.metrics_addresses
            ]

        def join(first: Listener, second: Listener) -> Mapping[str, Route]:
            return shared_routes(first.routes, second.routes, self.registry)

        shared = [self._described(listener) for listener in share_addresses(listeners, join)]
        return [*shared, *self._of_platform(inference)]

    def _of_platform(self, inference: Mapping[str, Route]) -> Iterator[Listener]:
        """Yield the listeners of the platform; only KServe has any."""
        platform = self.config.platform
        for address in platform.setup.inference:
            plain = self._described(Listener("Inference", address, inference, when_ready=True))
            own = kserve_platform_routes(
                self.registry, self.config.max_request_size, plain.routes[""]
            )
            yield replace(plain, name=platform.title, routes={**plain.routes, **own})

    def _described(self, listener: Listener) -> Listener:
        open_inference = self.config.ts_open_inference_protocol
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
        config = self.config
        # Web pages cannot connect to a unix socket.
        on_network = isinstance(listener.address, Address)
        router = Router(
            listener.routes,
            guard=Guard.of(config, self.tokens, browsers=on_network),
            access_log=self.access_log,
            common_headers=common_headers(
                {
                    "access-control-allow-origin": config.cors_allowed_origin,
                    "access-control-allow-methods": config.cors_allowed_methods,
                    "access-control-allow-headers": config.cors_allowed_headers,
                }
            ),
        )

        def on_limit(limit: str) -> None:
            reached = self.metrics.limits_reached
            reached.join(listener.name, limit, self.metrics.hostname).update(1)

        clients = HttpServer(router, limits, on_limit=on_limit)
        usages[listener.name] = clients.usage
        opened.push_async_callback(clients.close, _CLOSE_SECONDS)
        make: Callable[[], asyncio.Protocol] = clients
        if self.tls is not None and listener.address.url.startswith("https:"):
            handshakes = await opened.enter_async_context(BackgroundTasks())
            make = partial(TlsHandshake, clients, self.tls, handshakes)
        bound = await bind_listener(opened, listener.address, make)
        return replace(bound, when_ready=listener.when_ready)

    def _limits(self, listeners: int) -> ConnectionLimits:
        config = self.config
        in_flight = bytes_in_flight(config.max_bytes_in_flight)
        from_client = config.max_client_bytes_in_flight or in_flight // 2
        return ConnectionLimits(
            head_timeout=config.request_head_timeout,
            body_timeout=config.request_body_timeout,
            body_rate=config.request_body_rate,
            write_timeout=config.response_write_timeout,
            write_rate=config.response_write_rate,
            max_connections=config.max_connections,
            max_client_connections=config.max_client_connections,
            # A single request of the maximum size can always be served.
            max_bytes_in_flight=max(in_flight, config.max_request_size),
            max_client_bytes_in_flight=max(from_client, config.max_request_size),
            forms=FormLimits(config.max_form_parts, config.max_part_header_size),
            listeners=listeners,
            has_grpc=config.enable_grpc,
        )


def watch_bytes(metrics: Metrics, usages: Mapping[str, Usage]) -> None:
    """Add the gauge of the bytes that each listener, by its name, keeps in memory."""

    def in_flight() -> Iterable[tuple[Sequence[str], float]]:
        return [((name, metrics.hostname), usage.bytes) for name, usage in usages.items()]

    text = "Bytes of requests and answers that the clients of a listener keep in memory"
    labels = ("listener", "hostname")
    metrics.registry.watch(WatchedGauge("marserve_bytes_in_flight", text, labels, in_flight))
