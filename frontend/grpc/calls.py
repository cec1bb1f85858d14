"""Calls: checks their keys, reads, answers, counts and logs them.

A `Service` names a service of a .proto file and an object with a method for each of its calls. The
method has the name of the call in lower case with underscores:

    async def ping(self, request, call) -> Message     one request, one answer
    async def watch(self, request, call) -> Answers    one request, a stream of answers
    async def chat(self, requests, call) -> Answers    a stream of requests, a stream of answers

The latter two are asynchronous generators. A ServeError that a method raises is the answer; another
exception is logged, and the client gets INTERNAL. When the client cancels the call, or its deadline
passes, the method is cancelled. `endpoints` has the services of each listener.

Messages are parsed here, because grpc logs a traceback for each malformed one and answers UNKNOWN.
"""

import asyncio
import base64
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import StatusCode

from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import RequestExpired, ServeError, ServerStopping, unexpected
from marserve.frontend.grpc.call_limits import CallKind, Limits
from marserve.frontend.grpc.message_reads import Context, next_message
from marserve.frontend.grpc.messages import Answers, Message, message_class
from marserve.frontend.grpc.statuses import GrpcStatus, http_status_of, number_of, status_of
from marserve.frontend.operations.request_options import read_request_options
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import Kind
from marserve.frontend.security.usage import UNCOUNTED_BYTES, RequestMemory
from marserve.frontend.serving.predict_request import RequestOptions
from marserve.frontend.serving.request_ids import new_request_id
from marserve.frontend.telemetry.access_log import CLIENT_ID_HEADER, AccessLog
from marserve.frontend.telemetry.trace_context import NO_SAMPLING, RequestTrace, TraceContext

logger = logging.getLogger(__name__)

# Metadata that handlers do not get.
_SECRETS = frozenset({"authorization", "cookie", "proxy-authorization"})
_UPPER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
# Calls that are answered beyond the limits, so that balancers do not remove every replica.
_HEALTH = frozenset(("Ping", "ServerLive", "ServerReady", "ModelReady"))
_MAX_WAITING_WHEN_FULL = 1 << 20


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Return False for the traceback that grpc logs when a client leaves during an answer."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Service:
    """A service that a listener offers."""

    descriptor: ServiceDescriptor
    calls: object  # with a method for each call
    key: Kind | None  # that clients need if keys are enabled
    status_of: Callable[[ServeError], GrpcStatus] = status_of
    #: Instead of ``status_of``, for single calls by name.
    statuses: Mapping[str, Callable[[ServeError], GrpcStatus]] = field(default_factory=dict)


class Call:
    """A call, as the methods of services get it."""

    __slots__ = (
        "_metadata",
        "_sampling",
        "_usage",
        "arrived",
        "context",
        "is_cut_off",
        "memory",
        "method",
        "model",
        "request_id",
        "stopping",
        "trace",
    )

    def __init__(self, method: str, metadata: Metadata, router: "CallRouter") -> None:
        self.method = method  # as package.Service/Method
        self.arrived = time.monotonic()
        self.stopping = router.stopping
        self.is_cut_off = False  # whether its requests ended because the server stops
        self._usage = router.usage
        self._metadata = metadata
        self.memory: RequestMemory  # of its last request
        self.context: Context | None = None  # while it is answered
        #: For the log: the model and the id of its last request; empty for none.
        self.model = self.request_id = ""
        self.trace: RequestTrace | None = None  # of its last request
        self._sampling = router.sampling

    def new_request_id(self) -> str:
        """Return the id of a request to a model."""
        self.request_id = new_request_id()
        return self.request_id

    def receive(self, size: int, *, is_vital: bool = False) -> RequestMemory:
        """Return the memory of a request with a message of this size, until the task is done.

        The task is the current one. Raises TooMuchInFlight; if it ``is_vital``, only for a message
        that is not small.
        """
        usage, task = self._usage, asyncio.current_task()
        assert task is not None
        self.memory = memory = RequestMemory(usage, usage.client(self.host()))
        memory.is_vital = is_vital
        if size > UNCOUNTED_BYTES or usage.bytes:
            memory.hold(size)
        task.add_done_callback(lambda _task: memory.close())
        return memory

    def follow(self, stream: Stream) -> None:
        """Count what waits in a stream; break it off when too much is in flight."""
        usage, client = self._usage, self._usage.client(self.host())

        def count(more: int) -> None:
            usage.add(client, more)
            # Other clients may have filled it; a client that reads has few bytes waiting.
            if usage.is_full and more > 0 and stream.waiting_bytes > _MAX_WAITING_WHEN_FULL:
                stream.fall_behind("the client is too slow, and too much is in flight")

        usage.add(client, stream.waiting_bytes)
        stream.on_waiting = count

    def headers(self) -> dict[str, str]:
        """Return the metadata of the client as headers of a request, without secrets."""
        headers: dict[str, str] = {}
        for name, value in self._metadata:
            if name not in _SECRETS:
                text = value if isinstance(value, str) else base64.b64encode(value).decode()
                headers[name] = f"{headers[name]}, {text}" if name in headers else text
        self.trace = trace = self._sampling.context_of(headers)
        if not isinstance(trace, TraceContext):
            return headers
        of_call = {"rpc.system.name": "grpc", "rpc.method": self.method}
        self.trace = trace._replace(attributes=of_call)
        return trace.applied_to(headers)

    def metadata(self, name: str) -> str | None:
        """Return the first value of a name, or None."""
        for known, value in self._metadata:
            if known == name and isinstance(value, str):
                return value
        return None

    def options(self, headers: Mapping[str, str]) -> RequestOptions:
        """Return timeout and priority of the client, from its headers and the call's deadline."""
        options = read_request_options(headers)
        left = self.context.time_remaining() if self.context is not None else None
        if left is None:
            return options
        timeout = time.monotonic() - self.arrived + left
        return RequestOptions(min(timeout, options.timeout), options.priority)

    def peer(self) -> str:
        """Return the client as ``host:port``."""
        if self.context is None:
            return ""
        kind, _, address = self.context.peer().partition(":")
        if kind == "ipv6":
            return address.replace("%5B", "[").replace("%5D", "]")
        return address

    def host(self) -> str:
        """Return the address of the client."""
        return self.peer().rpartition(":")[0]


class CallRouter(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Passes the calls of a listener to its services."""

    def __init__(
        self, services: Sequence[Service], guard: Guard, access_log: AccessLog, limits: Limits
    ) -> None:
        self._guard = guard
        self._access_log = access_log
        self._limits = limits
        self.usage = limits.usage
        self.sampling = NO_SAMPLING
        #: The time for a client to read a message of a stream: seconds, and bytes for each more.
        self.write_limits: tuple[float, int] = (60.0, 1000)
        keyless, unary, streams = limits.kinds()
        #: Set when no more calls are accepted.
        self.stopping = asyncio.Event()
        #: Tasks that wait for the next request of a stream.
        self.readers: set[asyncio.Task[Any]] = set()
        self._methods = {
            f"/{service.descriptor.full_name}/{method.name}": _Method(
                self,
                service,
                method,
                keyless if service.key is None else streams if method.client_streaming else unary,
            )
            for service in services
            for method in service.descriptor.methods
        }

    def stop(self) -> None:
        """Refuse all further calls, and end streams that wait for requests."""
        self.stopping.set()
        for reader in self.readers:
            reader.cancel()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Return the handler of a call; grpc calls this in the task that answers the call."""
        metadata: Metadata = handler_call_details.invocation_metadata
        name = handler_call_details.method
        call = Call(name.removeprefix("/"), metadata, self)
        method = self._methods.get(name)
        try:
            if method is None:
                status = GrpcStatus(StatusCode.UNIMPLEMENTED, f"Unknown method: {name[:200]}.", "")
                return self._refusal(call, status)
            if self._guard.checks(method.key):
                headers = {key: value for key, value in metadata if isinstance(value, str)}
                self._guard.admit(method.key, headers)
        except ServeError as error:
            # TorchServe's text has no class here.
            status = GrpcStatus(StatusCode.PERMISSION_DENIED, error.message, "")
            return self._refusal(call, status)
        if self.stopping.is_set():
            return self._refusal(call, status_of(ServerStopping()))
        kind = method.kind
        if kind.open >= kind.max_open:
            self._limits.on_limit(kind.limit)
            text = f"{kind.open} calls are open, as many as {kind.limit} allows."
            return self._refusal(call, GrpcStatus(StatusCode.RESOURCE_EXHAUSTED, text, ""))
        task = asyncio.current_task()
        assert task is not None
        kind.open += 1
        task.add_done_callback(kind.remove)
        return method.handler(call)

    def _refusal(self, call: Call, status: GrpcStatus) -> Any:
        async def refuse(_requests: object, context: Context) -> None:
            call.context = context
            await self.fail(call, context, status)

        # A stream, so that grpc reads no message.
        return grpc.stream_stream_rpc_method_handler(refuse)

    async def write(self, context: Context, message: bytes) -> None:
        """Send a message of a stream; raises RequestExpired if the client does not read.

        The model is free then. The call is open until the client has read its status.
        """
        timeout, rate = self.write_limits
        try:
            async with asyncio.timeout(timeout + (len(message) / rate if rate else 0)):
                await context.write(message)
        except TimeoutError:
            self._limits.on_limit("response_write_timeout")
            raise RequestExpired("The client has not read its answer in time.") from None

    async def fail(self, call: Call, context: Context, status: GrpcStatus) -> None:
        """Log the end of a call and abort it; always raises."""
        self.log(call, status.code)
        await context.abort(status.code, status.text)

    def log(self, call: Call, code: StatusCode) -> None:
        """Log and count the end of a call; called before the client gets the status."""
        self._access_log.add_call(
            call.peer(),
            call.method,
            number_of(code),
            http_status_of(code),
            time.monotonic() - call.arrived,
            call.request_id,
            call.metadata(CLIENT_ID_HEADER),
            call.model,
            call.trace,
        )


class _Method:
    """One method of a service: makes the handler of each call.

    For grpc every method has a stream of requests, even with one request: the message is read here,
    so that the read can be limited and ended.
    """

    def __init__(
        self, router: CallRouter, service: Service, method: MethodDescriptor, kind: CallKind
    ) -> None:
        self._router = router
        self._status_of = service.statuses.get(method.name, service.status_of)
        self.key = service.key
        self.kind = kind
        self._request = message_class(method.input_type)
        fields = method.input_type.fields_by_name
        #: The field that names a model; empty if there is none.
        self._model_field = next((name for name in ("model_name", "name") if name in fields), "")
        self._serve = getattr(service.calls, _UPPER.sub("_", method.name).lower())
        self._takes_stream = method.client_streaming
        self._is_vital = service.key != "inference" or method.name in _HEALTH
        self._make: Callable[[Any], Any] = grpc.stream_unary_rpc_method_handler
        self._answer: Callable[..., Awaitable[Any]] = self._unary
        if method.server_streaming:
            self._make, self._answer = grpc.stream_stream_rpc_method_handler, self._stream

    def handler(self, call: Call) -> Any:
        return self._make(partial(self._answer, call))

    async def _unary(self, call: Call, _requests: object, context: Context) -> bytes:
        async def answer() -> bytes:
            request = self._request_of(call, await self._first(call, context))
            data: bytes = (await self._serve(request, call)).SerializeToString()
            call.memory.hold_answer(len(data))
            return data

        data: bytes = await self._run(call, context, answer())
        return data

    async def _stream(self, call: Call, _requests: object, context: Context) -> None:
        async def answer() -> None:
            if self._takes_stream:
                requests = self._requests(call, context)
            else:
                requests = self._request_of(call, await self._first(call, context))
            await self._send(self._serve(requests, call), context)
            if call.is_cut_off:
                raise ServerStopping

        await self._run(call, context, answer())

    def _first(self, call: Call, context: Context) -> Awaitable[bytes | None]:
        return self.kind.reads.first(context, call.host(), partial(self._fail, call, context))

    async def _fail(self, call: Call, context: Context, error: ServeError) -> None:
        await self._router.fail(call, context, self._status_of(error))

    def _request_of(self, call: Call, data: bytes | None) -> Message:
        if data is None:
            raise DecodeError
        call.receive(len(data), is_vital=self._is_vital)
        return self._message(call, data)

    async def _requests(self, call: Call, context: Context) -> AsyncIterator[Message]:
        """Yield the requests of a stream; it ends when the server stops."""
        router, reader = self._router, asyncio.current_task()
        assert reader is not None
        is_first = True
        while not router.stopping.is_set():
            router.readers.add(reader)
            try:
                # Without a key, every message of a stream has the limits of the first.
                if is_first or self.key is None:
                    data = await self._first(call, context)
                else:
                    data = await next_message(context)
            except asyncio.CancelledError:
                if not router.stopping.is_set():
                    raise
                reader.uncancel()
                break
            finally:
                router.readers.discard(reader)
            if data is None:
                return
            yield self._message(call, data)
            is_first = False
        call.is_cut_off = True

    async def _send(self, answers: Answers, context: Context) -> None:
        async with aclosing(answers) as open_answers:
            async for answer in open_answers:
                await self._router.write(context, answer.SerializeToString())

    def _message(self, call: Call, data: bytes) -> Message:
        try:
            message = self._request.FromString(data)
        except UnicodeDecodeError as error:  # from the pure Python code of protobuf
            raise DecodeError from error
        if self._model_field:
            call.model = getattr(message, self._model_field)
        return message

    async def _run(self, call: Call, context: Context, answering: Awaitable[Any]) -> Any:
        """Answer a call, also after an unexpected error, and log it."""
        call.context = context
        try:
            result = await answering
        except ServeError as error:
            status = self._status_of(error)
        except DecodeError:
            text = "The request is not a message of this type, or is incomplete."
            status = GrpcStatus(StatusCode.INVALID_ARGUMENT, text, "")
        except asyncio.CancelledError:
            is_late = context.time_remaining() == 0
            code = StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED
            self._router.log(call, code)
            raise
        except grpc.aio.AbortError:  # `MessageReads` has ended and logged it
            raise
        except grpc.aio.InternalError:  # a message could not be sent
            self._router.log(call, StatusCode.CANCELLED)
            raise asyncio.CancelledError from None
        except Exception as error:  # the last resort
            logger.exception("Cannot answer %s", call.method)
            status = self._status_of(unexpected(error))
        else:
            self._router.log(call, StatusCode.OK)
            return result
        # Outside the except clauses: grpc keeps the exception that this raises, and its __context__
        # would keep the request in memory.
        await self._router.fail(call, context, status)
        return None
