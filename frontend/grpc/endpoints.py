"""The gRPC listeners of the server, their services, guards and limits.

To add a service, add it to the list of its listener in `GrpcEndpoints._services`.

grpc.aio runs in the frontend's event loop. TLS, keepalive, flow control and compression are those
of grpc.

* Host and Origin are not checked as for HTTP (`guard`): browsers neither use HTTP/2 without TLS nor
  send the headers that gRPC requires, so web pages cannot send requests to it.
* A port in use ends the start, even if its owner allows sharing (``SO_REUSEPORT``).
* At the stop, open calls are answered while the models drain, as over HTTP, and then ended.

grpc has no timeout for a client that is connected but does not read its answer. Such a call keeps
one message in memory until its deadline or the end of its connection.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import grpc

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.configuration.addresses import Address, TlsFiles
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.tls import identity_pem
from marserve.frontend.grpc.call_limits import WINDOW_BYTES, Limits
from marserve.frontend.grpc.calls import Call, CallRouter, Service
from marserve.frontend.grpc.health import health_service
from marserve.frontend.grpc.inference import inference_service
from marserve.frontend.grpc.management import management_service
from marserve.frontend.grpc.messages import POOL, Answers, Message
from marserve.frontend.grpc.open_inference import open_inference_services, repository_service
from marserve.frontend.http.limits import grpc_descriptors
from marserve.frontend.operations.services import Services
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.usage import Usage

_INFERENCE, _MANAGEMENT = "gRPC Inference", "gRPC Management"
# Seconds for calls that are still open when every request is answered.
_CLOSE_SECONDS = 2.0
_MAX_INT = 2**31 - 1
# Clients that send pings more often are disconnected.
_MIN_PING_MS = 5000
_COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "deflate": grpc.Compression.Deflate,
    "gzip": grpc.Compression.Gzip,
}


class TlsIdentity:
    """Key and certificates of the server; making it reads them, or raises ConfigError."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._current: Any
        self.reload()

    def reload(self) -> None:
        """Read the files, for connections to come; with a ConfigError the old ones stay."""
        self._current = grpc.ssl_server_certificate_configuration([identity_pem(self._files)])

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a listener."""
        known = self._current

        def news() -> Any:
            """Return new files, or None; grpc calls this at each handshake."""
            nonlocal known
            if known is self._current:
                return None
            known = self._current
            return known

        return grpc.dynamic_ssl_server_credentials(known, news)


@dataclass
class GrpcListener:
    """A listener, which answers calls when it is bound and listens."""

    name: str
    address: Address  # port 0 is replaced when it is bound
    server: grpc.aio.Server
    router: CallRouter
    credentials: grpc.ServerCredentials | None  # None: no TLS
    when_ready: bool  # whether it is bound only when every model is READY

    def bind(self) -> None:
        """Bind the port, or raise OSError; clients are answered only after `listen`."""
        text = self.address.url.partition("://")[2]
        try:
            if self.credentials is not None:
                port = self.server.add_secure_port(text, self.credentials)
            else:
                port = self.server.add_insecure_port(text)
        except RuntimeError:
            port = 0
        if not port:
            raise OSError(
                f"Cannot listen at {self.address.url}: another program listens there, or this "
                f"machine has no such address. {self.name} has its own address and port in "
                "config.properties."
            )
        self.address = replace(self.address, port=port)

    async def listen(self, opened: AsyncExitStack) -> None:
        """Bind it if that is due only now, or raise OSError; answer until ``opened`` is closed."""
        if self.when_ready:
            self.bind()
        await self.server.start()
        stopping = await opened.enter_async_context(BackgroundTasks())
        opened.callback(lambda: stopping.start(self.server.stop(_MAX_INT)))
        opened.callback(self.router.stop)


@dataclass(frozen=True)
class GrpcEndpoints:
    """The gRPC listeners of a server."""

    services: Services
    tls: TlsIdentity | None  # None: no TLS

    async def bind(self, opened: AsyncExitStack) -> list[GrpcListener]:
        """Bind the listeners, inference first; those of a platform when models are ready."""
        inference, management = self.services.config.grpc_listeners
        for_inference, for_management = self._services()
        listeners = [
            self._listener(opened, _INFERENCE, inference, for_inference),
            self._listener(opened, _MANAGEMENT, management, for_management),
        ]
        for listener in listeners:
            listener.bind()
        platform = self.services.config.platform
        on_platform = [
            self._listener(
                opened, f"{platform.title} gRPC", address, self._services()[0], when_ready=True
            )
            for address in platform.setup.grpc_inference
        ]
        return [*listeners, *on_platform]

    def _services(self) -> tuple[Sequence[Service], Sequence[Service]]:
        """Return the services of the inference listener, and those of the management listener."""
        services, config, registry = self.services, self.services.config, self.services.registry
        inference = [
            inference_service(config, registry, services.workflows.workflows),
            *open_inference_services(config, registry),
            health_service(registry),
        ]
        management = [
            management_service(services.management),
            repository_service(services.repository()),
            health_service(registry),
        ]
        return (
            [*inference, *_reflection_services(inference)],
            [*management, *_reflection_services(management)],
        )

    def _listener(
        self,
        opened: AsyncExitStack,
        name: str,
        address: Address,
        services: Sequence[Service],
        *,
        when_ready: bool = False,
    ) -> GrpcListener:
        config, is_inference = self.services.config, name != _MANAGEMENT
        guard = Guard.of(config, self.services.tokens, browsers=False)
        router = CallRouter(services, guard, self.services.access_log, self._limits(name))
        router.sampling = self.services.sampling
        router.write_limits = config.response_write_timeout, config.response_write_rate
        server = grpc.aio.server(
            handlers=(router,),
            options=_options(config, is_inference=is_inference),
            compression=_COMPRESSIONS[config.grpc_compression],
        )
        opened.push_async_callback(server.stop, _CLOSE_SECONDS)
        credentials = None
        if self.tls is not None and address.scheme == "grpcs":
            credentials = self.tls.credentials()
        return GrpcListener(name, address, server, router, credentials, when_ready)

    def _limits(self, name: str) -> Limits:
        config = self.services.config

        def on_limit(limit: str, _sentence: str = "") -> None:
            self.services.count_limit(name, limit)

        long_work = self.services.long_work_of(is_inference=name != _MANAGEMENT)
        usage = Usage(*self.services.byte_limits(), on_limit, long_work)
        timeout = config.request_body_timeout
        if config.request_body_rate:
            timeout += config.max_request_size / config.request_body_rate
        return Limits(config.grpc_max_calls, usage, config.max_request_size, timeout, on_limit)


def _reflection_services(services: Sequence[Service]) -> Sequence[Service]:
    """Return the service that describes others and itself, for tools like grpcurl.

    It returns the content of the .proto files and nothing of this server, so it needs no key.
    Without the package ``grpcio-reflection`` there is none.
    """
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2
    except ImportError:
        return ()
    POOL.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
    descriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
    names = [service.descriptor.full_name for service in services]
    servicer = reflection.aio.ReflectionServicer(  # type: ignore[attr-defined]
        [*names, descriptor.full_name], POOL
    )

    def answer(requests: AsyncIterator[Message], _call: Call) -> Answers:
        answers: Answers = servicer.ServerReflectionInfo(requests, None)
        return answers

    calls = SimpleNamespace(server_reflection_info=answer)
    return (Service(descriptor, calls, key=None),)


def _options(config: Config, *, is_inference: bool) -> list[tuple[str, int]]:
    if is_inference:
        age = config.grpc_inference_max_connection_age_ms
        grace = config.grpc_inference_max_connection_age_grace_ms
    else:
        age = config.grpc_management_max_connection_age_ms
        grace = config.grpc_management_max_connection_age_grace_ms
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", min(config.max_request_size, _MAX_INT)),
        # Without a probe, the window of a call that is not read does not grow.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
        ("grpc.max_send_message_length", -1),  # the answers of workers have their own limit
        ("grpc.max_allowed_incoming_connections", _max_connections(config)),
        ("grpc.max_connection_age_ms", min(age or _MAX_INT, _MAX_INT)),
        ("grpc.max_connection_age_grace_ms", min(grace or _MAX_INT, _MAX_INT)),
        ("grpc.keepalive_time_ms", _milliseconds(config.grpc_keepalive_time)),
        ("grpc.keepalive_timeout_ms", _milliseconds(config.grpc_keepalive_timeout)),
        # Without this a ping may take a minute to be answered, at least with grpcio 1.85.
        ("grpc.http2.ping_timeout_ms", _milliseconds(config.grpc_keepalive_timeout)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_MS),
        ("grpc.server_handshake_timeout_ms", _milliseconds(config.request_head_timeout)),
    ]


def _max_connections(config: Config) -> int:
    """Return the share of a listener in the connections that gRPC may have."""
    listeners = len(config.grpc_listeners) + len(config.platform.setup.grpc_inference)
    limits = (config.max_connections, grpc_descriptors() // listeners)
    return min([_MAX_INT, *(limit for limit in limits if limit)])


def _milliseconds(seconds: float) -> int:
    return min(max(1, round(seconds * 1000)), _MAX_INT)
