"""The context of a handler: its model and the requests of its batch, with TorchServe's API.

A worker has one `Context`, and sets a few attributes for each batch. Attributes that handlers set
remain for the next batch.

Before the first batch ids and headers are None and a status is dropped, so that the same code can
run while the model loads. An index beyond the batch is an error of the handler: IndexError.
"""

import contextlib
import copy
import os
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from marserve.backend.json_text import KEEP
from marserve.backend.metrics import MetricsStore
from marserve.backend.model_answers import ModelAnswer
from marserve.backend.protocol import SpanRecord
from marserve.backend.spans import Span, Trace, record_span, trace_of

_CONTAINERS = (dict, list, set)

#: The calls of the request that the current task belongs to: a handler may have stored its context
#: where that of a later request replaces it.
current_caller: ContextVar["Caller | None"] = ContextVar("current_caller", default=None)

OnIntermediate = Callable[[Sequence[Any], Mapping[int, str] | None, str, int], None]


class RunSamples(Protocol):
    """Runs a batch of samples through the handler, as if clients had sent them."""

    def __call__(self, rows: int = 1, file: str = "") -> None:
        """Run copies of a file of the archive, by default of the model's sample input.

        Raises:
            WarmUpFailed: There is no sample, or the handler failed.
        """


WarmUp = Callable[[RunSamples], None]


class Caller(Protocol):
    """What one request needs of the frontend, as long as it is unanswered (``is_open``)."""

    is_open: bool
    drain: Callable[[], Coroutine[Any, Any, None]]  # as `Context.drain`

    @property
    def infer(self) -> Callable[..., Coroutine[Any, Any, ModelAnswer]]:
        """Call a model; the arguments are those of `Context.infer`."""


class RequestProcessor:
    """One request of a batch: its headers as the client spelt them, and the head of its answer.

    Header values are str, except those of entries named after a part: ``{"content-type": …}``.
    """

    __slots__ = ("_reason_phrase", "_request_header", "_response_header", "_status_code")

    def __init__(self, request_header: dict[str, Any]) -> None:
        self._request_header = request_header
        self._status_code = 200
        self._reason_phrase: str | None = None
        self._response_header: dict[str, str] = {}

    def get_request_property(self, key: str) -> Any:
        """Return one request header, None if the client did not send it."""
        return self._request_header.get(key)

    def get_request_properties(self) -> dict[str, Any]:
        """Return all request headers."""
        return self._request_header

    def report_status(self, code: int, reason_phrase: str | None = None) -> None:
        """Set the status line of the answer."""
        self._status_code = code
        self._reason_phrase = reason_phrase

    def get_response_status_code(self) -> int:
        """Return the status of the answer, 200 by default."""
        return self._status_code

    def get_response_status_phrase(self) -> str | None:
        """Return the reason phrase of the answer, None for that of its status."""
        return self._reason_phrase

    def add_response_property(self, key: str, value: str) -> None:
        """Set a response header; TypeError if key or value is not a str."""
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(
                f"A response header is a str with a str value, not {key!r}: {value!r} "
                f"({type(value).__name__}); convert the value with str()"
            )
        self._response_header[key] = value

    def get_response_headers(self) -> dict[str, str]:
        """Return all response headers set so far."""
        return self._response_header

    def get_response_header(self, key: str) -> str | None:
        """Return one response header, None if it was not set."""
        return self._response_header.get(key)


class Context:
    """The model of a handler and, while it predicts, its batch.

    Args:
        manifest: MANIFEST.json of the archive, None without one.
        gpu: Ordinal of the worker's accelerator, None on the CPU.
        mms_version: The server's version.
        metrics: A `MetricsStore` in a worker, any object in a handler's test.

    Attributes:
        request_processor: One per request of the batch, None before the first batch. A handler may
            replace them.
        stopping_criteria: Set by handlers that answer in steps, in each step: one callable per
            request, or None. Called with the request's result; True means that its answer is
            complete. None again at the next batch.
        warm_ups: Functions that the handler appends while it is initialised. They are called before
            the worker receives requests; an exception fails the load.
        describe_compiled: Returns JSON values about what was compiled before the first request.
        tensors: The declaration of the model's tensors (`tensors.checks.is_declaration`), set after
            the handler is initialised.
        load_warnings: Sentences that the handler appends while it is initialised, for describe.
        max_response_bytes: The longest answer, or piece of one, that is sent to a client.
        json_nan: How NaN and infinities are written in JSON (`backend.json_text`).
        header_key_sequence_end: Response header with the sequences that have ended.
    """

    def __init__(
        self,
        model_name: str,
        model_dir: str,
        manifest: dict[str, Any] | None,
        batch_size: int,
        gpu: int | None,
        mms_version: str,
        limit_max_image_pixels: bool = True,
        metrics: Any = None,
        model_yaml_config: dict[str, Any] | None = None,
    ) -> None:
        self.model_name = model_name
        self.manifest = manifest
        self.system_properties: dict[str, Any] = {
            "model_dir": model_dir,
            "gpu_id": gpu,
            "batch_size": batch_size,
            "server_name": "MMS",
            "server_version": mms_version,
            "limit_max_image_pixels": limit_max_image_pixels,
        }
        self.model_yaml_config: dict[str, Any] = model_yaml_config or {}
        self.metrics = metrics
        if isinstance(metrics, MetricsStore):
            metrics.model_name = metrics.model_name or model_name
        self._request_ids: dict[int, str] | None = None
        self.request_processor: list[RequestProcessor] | None = None
        self.stopping_criteria: list[Any] | None = None
        self.on_intermediate: OnIntermediate | None = None
        self.max_response_bytes = 6_553_500
        self.json_nan = KEEP
        self.caller: Caller | None = None
        self.warm_ups: list[WarmUp] = []
        self.describe_compiled: Callable[[], dict[str, Any]] | None = None
        self.tensors: dict[str, Any] = {}
        self.load_warnings: list[str] = []
        self._spans: list[SpanRecord] = []
        self._cl_socket: Any = None
        self.header_key_sequence_id = _sequence_header("ID")
        self.header_key_sequence_start = _sequence_header("START")
        self.header_key_sequence_end = _sequence_header("END")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.__dict__ == other.__dict__

    # Equal by contents that change with every batch: no hash could stay true.
    __hash__ = None  # type: ignore[assignment]

    def for_batch(self) -> "Context":
        """Return a context for a batch beside others; only what is of a batch is separate."""
        return _BatchContext(self)

    def for_request(self) -> "Context":
        """Return a context for a request beside others.

        Attributes, lists, dicts and sets are separate, the values in them shared: no deep copy.
        """
        context = copy.copy(self)
        for name, value in vars(self).items():
            if type(value) in _CONTAINERS:
                setattr(context, name, value.copy())
        store = self.metrics  # a handler may have replaced it
        context.metrics = store.for_batch() if isinstance(store, MetricsStore) else store
        context.request_ids = context.request_processor = context.stopping_criteria = None
        return context

    @property
    def request_ids(self) -> dict[int, str] | None:
        """The request ids by place in the batch; None without a batch."""
        return self._request_ids

    @request_ids.setter
    def request_ids(self, ids: dict[int, str] | None) -> None:
        self._request_ids = ids
        # None, or an object of the handler that may refuse it.
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            self.metrics.request_ids = ids

    # Names of TorchServe that handlers use.

    @property
    def cl_socket(self) -> Any:
        """Has ``sendall`` for what `create_predict_response` returns; None without a batch."""
        if self._cl_socket is None and self.on_intermediate is not None:
            return _Clients(self)
        return self._cl_socket

    @cl_socket.setter
    def cl_socket(self, sock: Any) -> None:
        self._cl_socket = sock

    @property
    def _request_processor(self) -> list[RequestProcessor] | None:
        return self.request_processor

    @_request_processor.setter
    def _request_processor(self, processors: list[RequestProcessor] | None) -> None:
        self.request_processor = processors

    @property
    def _system_properties(self) -> dict[str, Any]:
        return self.system_properties

    def get_request_id(self, idx: int = 0) -> str | None:
        """Return the id of a request, None without a batch or beyond its end."""
        return (self.request_ids or {}).get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        """Return a header of a request, None if it has none; case matters."""
        if self.request_processor is None:
            return None
        return self._request(idx).get_request_property(key)

    def get_all_request_header(self, idx: int) -> dict[str, Any]:
        """Return all headers of a request."""
        return self._request(idx).get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        """Set the content type of a request's answer."""
        self.set_response_header(idx, "content-type", value)

    def get_response_content_type(self, idx: int) -> str | None:
        """Return the content type set for a request's answer, None if none is."""
        return self._request(idx).get_response_header("content-type")

    def set_response_status(self, code: int = 200, phrase: str = "", idx: int = 0) -> None:
        """Set the status line of one request's answer."""
        if self.request_processor is not None:
            self._request(idx).report_status(code, phrase)

    def set_all_response_status(self, code: int = 200, phrase: str = "") -> None:
        """Set the status line of every answer of the batch."""
        for request in self.request_processor or ():
            request.report_status(code, phrase)

    def get_response_status(self, idx: int) -> tuple[int, str | None]:
        """Return status and reason phrase of a request's answer."""
        request = self._request(idx)
        return request.get_response_status_code(), request.get_response_status_phrase()

    def set_response_header(self, idx: int, key: str, value: str) -> None:
        """Set a header of one request's answer."""
        self._request(idx).add_response_property(key, value)

    def get_response_headers(self, idx: int) -> dict[str, str]:
        """Return the headers set for a request's answer."""
        return self._request(idx).get_response_headers()

    def get_sequence_id(self, idx: int) -> Any:
        """Return the id of the sequence of a request, None if it has none."""
        return self.get_request_header(idx, self.header_key_sequence_id)

    def send_intermediate(
        self,
        results: Sequence[Any],
        request_ids: Mapping[int, str] | None = None,
        message: str = "",
        code: int = 200,
    ) -> None:
        """Send pieces of the answers; the handler's return value is the last piece.

        Args:
            results: One per request.
            request_ids: Their requests, as in `request_ids`; by default all.
            message: For clients, if ``code`` is not 200.
            code: A code other than 200 ends the answers of the batch with a failure.

        Raises:
            RuntimeError: There is no batch, or it is answered.
            ValueError: The results do not fit the requests.
        """
        if self.on_intermediate is None:
            raise RuntimeError("There is no batch to whose clients results could be sent")
        self.on_intermediate(results, request_ids, message, code)

    async def drain(self) -> None:
        """Wait until the client has read enough of the pieces that were sent, mostly not at all.

        For asynchronous handlers, after each piece: otherwise the pieces fill the memory, and the
        answer of a slow client is broken off. It does not wait in other handlers or without a
        server. Not part of TorchServe.
        """
        if self.caller is not None:
            await self.caller.drain()

    def infer(
        self,
        model: str,
        data: Any = None,
        *,
        version: str | None = None,
        parts: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, ModelAnswer]:
        """Call another model of the server, as a client would, and await its answer.

        For asynchronous handlers, while they answer a request. The call has the priority of the
        request and at most the time that it has left, and is cancelled with it. Not part of
        TorchServe.

        Args:
            model: The name of the model.
            data: The body: bytes, text, a tensor, or a value for JSON.
            version: By default, the model's default version.
            parts: Several named values instead of ``data``, as in a form.
            headers: For the model's handler.
            timeout: In seconds.

        Raises:
            RuntimeError: There is no request, or it is answered.
            ModelCallFailed: When awaited: the model did not answer, or with a failure.
        """
        caller = current_caller.get() or self.caller
        if caller is not None and not caller.is_open:
            caller = self.caller or caller  # a task that an earlier request has started
        if caller is None:
            raise RuntimeError(
                "context.infer() calls a model on behalf of a request of an asynchronous handler "
                "(async def handle, with asyncCommunication: true in model-config.yaml), in a "
                "server; there is no such request"
            )
        return caller.infer(
            model, data, version=version, parts=parts, headers=headers, timeout=timeout
        )

    def trace(self, idx: int = 0) -> Trace | None:
        """Return the trace of a request: trace_id, span_id, sampled; None if it has none.

        Not part of TorchServe.
        """
        if self.request_processor is None:
            return None
        return trace_of(self._request(idx).get_request_properties())

    def span(
        self, name: str, /, idx: int = 0, **attributes: Any
    ) -> contextlib.AbstractContextManager[Span]:
        """Return a context manager that adds a span to the trace of a request, if it is sampled.

        Not part of TorchServe.
        """
        return record_span(self._spans, self.trace(idx), name, attributes)

    def take_spans(self) -> tuple[SpanRecord, ...]:
        """Remove and return the spans that have ended."""
        if taken := tuple(self._spans):
            self._spans.clear()
        return taken

    @contextmanager
    def limited_to(self, indices: Sequence[int]) -> Iterator[None]:
        """Limit the context to some requests of the batch during a ``with`` block."""
        ids, processors = self.request_ids, self.request_processor
        if ids is not None:
            # A context of tests creates missing ids.
            self.request_ids = {
                new: self.get_request_id(old) or "" for new, old in enumerate(indices)
            }
        if processors is not None:
            self.request_processor = [processors[old] for old in indices]
        try:
            yield
        finally:
            self.request_ids, self.request_processor = ids, processors

    def _request(self, idx: int) -> RequestProcessor:
        requests = () if self.request_processor is None else self.request_processor
        try:
            return requests[idx]
        except IndexError:
            raise IndexError(f"No request {idx} in a batch of {len(requests)}") from None


class _Clients:
    def __init__(self, context: Context) -> None:
        self._context = context

    def sendall(self, message: Any) -> None:
        """Send a result of `create_predict_response`."""
        if message is None:  # on other ranks than 0
            return
        arguments = getattr(message, "arguments", None)
        if arguments is None:
            raise TypeError("context.cl_socket only sends results of create_predict_response")
        self._context.send_intermediate(*arguments)


class _BatchContext(Context):
    """The context of one batch; other attributes are set on ``shared``, for the next batch."""

    _OWN = frozenset(
        (
            "_request_ids",
            "_request_processor",
            "_spans",
            "metrics",
            "on_intermediate",
            "request_ids",
            "request_processor",
            "stopping_criteria",
        )
    )

    def __init__(self, shared: Context) -> None:
        object.__setattr__(self, "_shared", shared)
        store = shared.metrics  # a handler may have replaced it
        self.metrics = store.for_batch() if isinstance(store, MetricsStore) else store
        self.request_ids = self.request_processor = None
        self.stopping_criteria = self.on_intermediate = None
        self._spans = []

    def __getattr__(self, name: str) -> Any:
        if name == "_shared":  # a copy that is not complete
            raise AttributeError(name)
        return getattr(self._shared, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self if name in self._OWN else self._shared, name, value)

    def __delattr__(self, name: str) -> None:
        object.__delattr__(self if name in self._OWN else self._shared, name)


def _sequence_header(part: str) -> str:
    name = f"TS_REQUEST_SEQUENCE_{part}"
    return os.environ.get(name, name.lower())
