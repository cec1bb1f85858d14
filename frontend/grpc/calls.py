"""Calls: who may make them, how they are read, answered, counted and logged.

A `Service` names a service of a .proto file and an object with a method for each of its calls. The
method has the name of the call in lower case with underscores:

    async def ping(self, request, call) -> Message     one request, one answer
    async def watch(self, request, call) -> Answers    one request, answers in a stream
    async def chat(self, requests, call) -> Answers    requests as they come, answers in a stream

The latter two are asynchronous generators. A ServeError that a method raises is the answer; another
exception is logged, and the client gets INTERNAL. When the client cancels the call, or its deadline
passes, the method is cancelled. `endpoints` has the services of each listener.

Messages are parsed here: grpc would log a traceback for each that is broken, and answer UNKNOWN.
"""

import asyncio
import base64
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from grpc import StatusCode

from marserve.backend.protocol import Prediction
from marserve.frontend.batching.jobs import Stream
from marserve.frontend.errors import ServeError, ServerStopping, unexpected
from marserve.frontend.grpc.call_limits import CallKind, Limits
from marserve.frontend.grpc.message_reads import Context, next_message
from marserve.frontend.grpc.messages import Answers, Message, message_class
from marserve.frontend.grpc.statuses import Failure, failure_of, http_status_of, number_of
from marserve.frontend.operations.request_options import read_request_options
from marserve.frontend.security.guard import Guard
from marserve.frontend.security.tokens import Kind
from marserve.frontend.security.usage import ClientUsage, Holding
from marserve.frontend.serving.predict_request import RequestOptions
from marserve.frontend.telemetry.access_log import AccessLog

logger = logging.getLogger(__name__)

# Handlers are shown what clients say, but for what opens doors.
_SECRETS = frozenset({"authorization", "cookie", "proxy-authorization"})
_UPPER = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_COUNTED_BYTES = 1 << 16
_MAX_WAITING_WHEN_FULL = 1 << 20


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False of the traceback that grpc logs for each client that leaves while it is answered."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_a_line)

Metadata = Sequence[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Service:
    """A service that a listener offers.

    Attributes:
        descriptor: What it is called, and the calls it has.
        calls: Has a method for each of them.
        key: The key that clients need where tokens are on; None for none.
        failure_of: Translates the errors of its methods.
    """

    descriptor: ServiceDescriptor
    calls: object
    key: Kind | None
    failure_of: Callable[[ServeError], Failure] = failure_of


class Call:
    """A call, as the methods of services see it.

    Attributes:
        method: Its full name, as ``package.Service/Method``.
        arrived: When it began, in seconds on the monotonic clock.
        stopping: Set when the server stops, and streams should end.
        is_cut_off: Whether its requests ended because the server stops.
    """

    __slots__ = ("_context", "_metadata", "_usage", "arrived", "is_cut_off", "method", "stopping")

    def __init__(self, method: str, metadata: Metadata, router: "CallRouter") -> None:
        self.method = method
        self.arrived = time.monotonic()
        self.stopping = router.stopping
        self.is_cut_off = False
        self._usage = router.usage
        self._metadata = metadata
        self._context: Context | None = None

    def begin(self, context: Context) -> None:
        """Note that it is being answered."""
        self._context = context

    def hold(self, size: int) -> None:
        """Count the bytes of a request, if it is large, until the current task is done.

        Raises:
            TooMuchInFlight: There are too many.
        """
        usage = self._usage
        is_small = size <= _COUNTED_BYTES
        if is_small and (not usage.bytes or not size):
            return
        client = usage.client(self.host())
        if is_small and not usage.limit_of(client, size):
            return
        usage.hold(client, size)
        self._release_with_task(client, size)

    def holding(self) -> Holding:
        """Return what counts the memory of the call beside its messages."""
        return Holding(self._usage, self._usage.client(self.host()))

    def count_answer(self, answer: Prediction | Stream | int) -> None:
        """Count a large answer, or its number of bytes, until the current task has sent it.

        Its client may read slowly, or never; where too much is in flight, requests are refused. Of
        an answer in pieces counts what waits; it is broken off where too much is in flight.
        """
        if isinstance(answer, Stream):
            self._follow(answer)
            return
        size = answer if isinstance(answer, int) else len(answer.body)
        if size > _COUNTED_BYTES:
            client = self._usage.client(self.host())
            self._usage.add(client, size)
            self._release_with_task(client, size)

    def _follow(self, stream: Stream) -> None:
        usage, client = self._usage, self._usage.client(self.host())

        def count(more: int) -> None:
            usage.add(client, more)
            # Others may have filled it; a client that reads has not much waiting.
            if usage.is_full and more > 0 and stream.waiting_bytes > _MAX_WAITING_WHEN_FULL:
                stream.fall_behind("the client is too slow, and too much is in flight")

        usage.add(client, stream.waiting_bytes)
        stream.on_waiting = count

    def _release_with_task(self, client: ClientUsage, size: int) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _task: self._usage.add(client, -size))

    def headers(self) -> dict[str, str]:
        """The client's metadata, as handlers see headers; without secrets."""
        headers: dict[str, str] = {}
        for name, value in self._metadata:
            if name not in _SECRETS:
                text = value if isinstance(value, str) else base64.b64encode(value).decode()
                headers[name] = f"{headers[name]}, {text}" if name in headers else text
        return headers

    def metadata(self, name: str) -> str | None:
        """The first value of one name."""
        for known, value in self._metadata:
            if known == name and isinstance(value, str):
                return value
        return None

    def options(self, headers: Mapping[str, str]) -> RequestOptions:
        """How soon the client wants an answer: by its headers, and by the call's deadline.

        Raises:
            BadRequest: A header is invalid.
        """
        options = read_request_options(headers)
        left = self._context.time_remaining() if self._context is not None else None
        if left is None:
            return options
        timeout = time.monotonic() - self.arrived + left
        return RequestOptions(min(timeout, options.timeout), options.priority)

    def peer(self) -> str:
        """The client, as ``host:port``."""
        if self._context is None:
            return ""
        kind, _, address = self._context.peer().partition(":")
        if kind == "ipv6":
            return address.replace("%5B", "[").replace("%5D", "]")
        return address

    def host(self) -> str:
        """The client's address."""
        return self.peer().rpartition(":")[0]


class CallRouter(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # the stubs' invention
    """Everything between grpc and the services of a listener.

    Args:
        services: What it offers.
        guard: Checks keys, and where calls come from.
        access_log: Logs every call.
        limits: What its clients may use.
    """

    def __init__(
        self,
        services: Sequence[Service],
        guard: Guard,
        access_log: AccessLog,
        limits: Limits,
    ) -> None:
        self._guard = guard
        self._access_log = access_log
        self._limits = limits
        self.usage = limits.usage
        keyless, unary, streams = limits.kinds()
        #: Set when no more calls are taken.
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
        """Called by grpc at the beginning of a call, in the task that will answer it."""
        metadata: Metadata = handler_call_details.invocation_metadata
        name = handler_call_details.method
        call = Call(name.removeprefix("/"), metadata, self)
        method = self._methods.get(name)
        try:
            if method is None:
                failure = Failure(StatusCode.UNIMPLEMENTED, f"There is no method {name[:200]}.", "")
                return self._refusal(call, failure)
            if self._guard.checks(method.key):
                headers = {key: value for key, value in metadata if isinstance(value, str)}
                self._guard.admit(method.key, headers)
        except ServeError as error:
            # The text of TorchServe has no class here.
            failure = Failure(StatusCode.PERMISSION_DENIED, error.message, "")
            return self._refusal(call, failure)
        if self.stopping.is_set():
            return self._refusal(call, failure_of(ServerStopping()))
        kind = method.kind
        if kind.open >= kind.max_open:
            self._limits.on_limit(kind.limit)
            text = f"{kind.open} calls are open, as many as {kind.limit} allows."
            return self._refusal(call, Failure(StatusCode.RESOURCE_EXHAUSTED, text, ""))
        task = asyncio.current_task()
        assert task is not None
        kind.open += 1
        task.add_done_callback(kind.remove)
        return method.handler(call)

    def _refusal(self, call: Call, failure: Failure) -> Any:
        async def refuse(_requests: object, context: Context) -> None:
            call.begin(context)
            await self.fail(call, context, failure)

        # Of a kind for which grpc reads no message.
        return grpc.stream_stream_rpc_method_handler(refuse)

    async def fail(self, call: Call, context: Context, failure: Failure) -> None:
        """End a call without an answer; raises what ends it."""
        self.log(call, failure.code)
        await context.abort(failure.code, failure.text)

    def log(self, call: Call, code: StatusCode) -> None:
        """Log and count the end of a call; before it is sent, so that its client finds it there."""
        seconds = time.monotonic() - call.arrived
        method = call.method
        status = http_status_of(code)
        self._access_log.add_call(call.peer(), method, number_of(code), status, seconds)


class _Method:
    """One method of a service: makes the handler that grpc wants for each call.

    grpc calls it as one that takes a stream of requests, also where there is one request: the
    message is read here, so that its read can be limited and ended.
    """

    def __init__(
        self, router: CallRouter, service: Service, method: MethodDescriptor, kind: CallKind
    ) -> None:
        self._router = router
        self._failure_of = service.failure_of
        self.key = service.key
        self.kind = kind
        self._request = message_class(method.input_type)
        self._serve = getattr(service.calls, _UPPER.sub("_", method.name).lower())
        self._takes_stream = method.client_streaming
        self._make: Callable[[Any], Any] = grpc.stream_unary_rpc_method_handler
        self._answer: Callable[..., Awaitable[Any]] = self._unary
        if method.server_streaming:
            self._make, self._answer = grpc.stream_stream_rpc_method_handler, self._stream

    def handler(self, call: Call) -> Any:
        """What grpc calls to answer a call."""
        return self._make(partial(self._answer, call))

    async def _unary(self, call: Call, _requests: object, context: Context) -> bytes:
        async def answer() -> bytes:
            request = self._request_of(call, await self._first(call, context))
            data: bytes = (await self._serve(request, call)).SerializeToString()
            call.count_answer(len(data))
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
        await self._router.fail(call, context, self._failure_of(error))

    def _request_of(self, call: Call, data: bytes | None) -> Message:
        if data is None:
            raise DecodeError
        call.hold(len(data))
        return self._message(data)

    async def _requests(self, call: Call, context: Context) -> AsyncIterator[Message]:
        """The requests of a stream, which ends as well when the server stops."""
        router, reader = self._router, asyncio.current_task()
        assert reader is not None
        is_first = True
        while not router.stopping.is_set():
            router.readers.add(reader)
            try:
                # Streams without a key have the limits of their first message for each.
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
            yield self._message(data)
            is_first = False
        call.is_cut_off = True

    async def _send(self, answers: Answers, context: Context) -> None:
        async with aclosing(answers) as open_answers:
            async for answer in open_answers:
                await context.write(answer.SerializeToString())

    def _message(self, data: bytes) -> Message:
        try:
            return self._request.FromString(data)
        except UnicodeDecodeError as error:  # of protobuf in Python, where it has no C code
            raise DecodeError from error

    async def _run(self, call: Call, context: Context, answering: Awaitable[Any]) -> Any:
        """Answer a call, whatever happens, and log it."""
        call.begin(context)
        try:
            result = await answering
        except ServeError as error:
            failure = self._failure_of(error)
        except DecodeError:
            text = "The request is not such a message, or is cut off."
            failure = Failure(StatusCode.INVALID_ARGUMENT, text, "")
        except asyncio.CancelledError:
            is_late = context.time_remaining() == 0
            code = StatusCode.DEADLINE_EXCEEDED if is_late else StatusCode.CANCELLED
            self._router.log(call, code)
            raise
        except grpc.aio.AbortError:  # `MessageReads` has ended and logged it
            raise
        except grpc.aio.InternalError:  # of a message that could not be sent
            self._router.log(call, StatusCode.CANCELLED)
            raise asyncio.CancelledError from None
        except Exception as error:  # the last resort
            logger.exception("Cannot answer %s", call.method)
            failure = self._failure_of(unexpected(error))
        else:
            self._router.log(call, StatusCode.OK)
            return result
        # Not in the except clauses: grpc keeps what this raises, and with it its context, whose
        # traceback refers to the request.
        await self._router.fail(call, context, failure)
        return None
