"""Makes spans of time lines by OpenTelemetry's SDK, and sends them; for the thread of `otel`.

predict MODEL    a request (server), from its arrival to its answer
  waiting        in the queue
  handler        of its batch, with a link to the span of the batch
  …              the handler's own spans, and the requests to other models that it has caused
batch            of several recorded requests; in the trace of the first, with links to all
"""

import logging
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from opentelemetry import trace as api
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from marserve.frontend.batching.batches import Batch
from marserve.frontend.logs.formats import excerpt
from marserve.frontend.telemetry.trace_context import TraceContext
from marserve.frontend.tracing.otel_transport import receiver_session
from marserve.frontend.tracing.time_lines import TimeLine
from marserve.frontend.version import __version__

logger = logging.getLogger(__name__)

_SDK_LOGGER = logging.getLogger("opentelemetry")
# Spans of one message.
_MAX_SENT = 512


class _GivenIds(IdGenerator):
    """Gives spans the ids that were passed on; others get random ones."""

    trace_id = span_id = 0

    def generate_span_id(self) -> int:
        given, self.span_id = self.span_id, 0
        return given or random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def is_trace_id_random(self) -> bool:
        return True


class _Ended(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class OtlpSpans:
    """Makes spans, and sends them to ``endpoint``."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._exporter = OTLPSpanExporter(endpoint, session=receiver_session())
        self._is_down = False
        self._level = logging.NOTSET  # of the SDK, while it is down
        self._ids, self._ended = _GivenIds(), _Ended()
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            resource = resource.merge(Resource({"service.name": "marserve"}))
        limits = SpanLimits()  # by variables
        self._max_text = limits.max_span_attribute_length
        provider = TracerProvider(
            ALWAYS_ON,
            resource,
            shutdown_on_exit=False,
            id_generator=self._ids,
            span_limits=limits,
        )
        provider.add_span_processor(self._ended)
        self._tracer = provider.get_tracer("marserve", __version__)
        self._epoch = time.time() - time.monotonic()

    def add(self, lines: Sequence[TimeLine]) -> None:
        """Make the spans of recorded requests; give all requests of a batch at once."""
        by_batch: defaultdict[Batch | None, list[TimeLine]] = defaultdict(list)
        for line in lines:
            by_batch[line.batch].append(line)
        for batch, of_batch in by_batch.items():
            links: list[api.Link] = []
            if batch is not None and batch.handler_started and len(of_batch) > 1:
                links = [self._add_batch(batch, of_batch)]
            for line in of_batch:
                self._add_request(line, links)

    def _add_request(self, line: TimeLine, links: Sequence[api.Link]) -> None:
        trace, batch, model = line.trace, line.batch, line.model
        assert isinstance(trace, TraceContext)
        attributes = {
            **trace.attributes,
            "marserve.request.id": line.id,
            "marserve.model.name": model.name,
            "marserve.model.version": model.version,
            "marserve.outcome": line.outcome,
        }
        if "http.request.method" in attributes:
            attributes["http.response.status_code"] = line.status
            attributes["http.request.body.size"] = line.size
        kind = api.SpanKind.SERVER if trace.attributes else api.SpanKind.INTERNAL
        self._ids.trace_id = int(trace.trace_id, 16)
        above, name = _inside(trace, trace.parent_id), f"predict {model.name}"
        span = self._start(name, line.arrived, above, attributes, trace.span_id, kind)
        if line.first_piece:
            span.add_event("first piece", timestamp=self._time_of(line.first_piece))
        inside = _inside(trace, trace.span_id)
        waited = line.answered if batch is None else batch.closed
        if waited > line.queued and model.version:  # a workflow does not wait
            self._end(self._start("waiting", line.queued, inside), waited)
        if batch is not None:
            self._add_handler(batch, trace, inside, links)
        self._end(span, line.answered, line.error if line.status >= 500 else None)

    def _add_handler(
        self, batch: Batch, trace: TraceContext, inside: Context, links: Sequence[api.Link]
    ) -> None:
        for each in batch.handler_spans:
            if each.request == trace.span_id:
                above = _inside(trace, each.parent_id)
                span = self._start(each.name, each.started, above, each.attributes, each.span_id)
                self._end(span, each.ended, each.error or None)
        if batch.handler_started:  # else it has failed
            attributes = _attributes(batch)
            span = self._start("handler", batch.handler_started, inside, attributes, links=links)
            self._end(span, batch.handler_ended)

    def _add_batch(self, batch: Batch, lines: Sequence[TimeLine]) -> api.Link:
        """Make the span of a batch, and return the link to it."""
        traces = [line.trace for line in lines if isinstance(line.trace, TraceContext)]
        inside = [_inside(trace, trace.span_id) for trace in traces]
        links = [_link(api.get_current_span(each)) for each in inside]
        span = self._start("batch", batch.closed, inside[0], _attributes(batch), links=links)
        # The handler's end is later while steps of it run.
        self._end(span, max(batch.closed + batch.took, batch.handler_ended))
        return _link(span)

    def send(self) -> int:
        """Send the spans; return how many are dropped, because the receiver does not accept them.

        After the first refusal the others are dropped too: each may take as long.
        """
        spans, self._ended.spans = self._ended.spans, []
        if not spans:
            return 0
        left = len(spans)
        for start in range(0, len(spans), _MAX_SENT):
            part = spans[start : start + _MAX_SENT]
            try:
                if self._exporter.export(part) is not SpanExportResult.SUCCESS:
                    break
            except requests.RequestException as error:  # of exporters before 1.40
                if not self._is_down:
                    logger.error("Spans were not sent: %s", excerpt(error))  # noqa: TRY400 - no traceback
                break
            left -= len(part)
        self._set_down(is_down=left > 0)
        self._epoch = time.time() - time.monotonic()  # the clock may have been set
        return left

    def _set_down(self, *, is_down: bool) -> None:
        """Log the first failure and its end; the SDK would log several lines for each message."""
        if is_down is self._is_down:
            return
        self._is_down = is_down
        if is_down:
            self._level = _SDK_LOGGER.level
            _SDK_LOGGER.setLevel(logging.CRITICAL)
            text = "Spans are dropped until %s accepts them; the next failures are not logged."
            logger.warning(text, self._endpoint)
        else:
            _SDK_LOGGER.setLevel(self._level)
            logger.info("%s accepts spans again.", self._endpoint)

    def close(self) -> None:
        """Close the connection to the receiver."""
        if self._is_down:
            _SDK_LOGGER.setLevel(self._level)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK has no type

    def _start(
        self,
        name: str,
        moment: float,
        context: Context,
        attributes: Mapping[str, Any] = {},
        span_id: str = "0",
        kind: api.SpanKind = api.SpanKind.INTERNAL,
        links: Sequence[api.Link] = (),
    ) -> api.Span:
        self._ids.span_id = int(span_id, 16)
        # The SDK logs a line for an empty name, and for each text that it cuts.
        clean = {
            _text(key): _text(value, self._max_text) for key, value in attributes.items() if key
        }
        start = self._time_of(moment)
        return self._tracer.start_span(_text(name), context, kind, clean, links, start)

    def _end(self, span: api.Span, moment: float, error: str | None = None) -> None:
        if error is not None:
            span.set_status(api.Status(api.StatusCode.ERROR, _text(error)))
        span.end(self._time_of(moment))

    def _time_of(self, moment: float) -> int:
        return round((self._epoch + moment) * 1e9)


def _attributes(batch: Batch) -> dict[str, str | int]:
    return {
        "marserve.batch.size": batch.size,
        "marserve.batch.ran_as": batch.run_as,
        "marserve.batch.reason": batch.reason.value,
        "marserve.worker.id": batch.worker_id,
    }


def _link(span: api.Span) -> api.Link:
    return api.Link(span.get_span_context())


def _inside(trace: TraceContext, span_id: str) -> Context:
    """Return the context of the children of a span; an empty one for no span."""
    if not span_id:
        return Context()
    state = api.TraceState.from_header([trace.state])
    flags, ids = api.TraceFlags(trace.flags), (int(trace.trace_id, 16), int(span_id, 16))
    span = api.SpanContext(*ids, is_remote=True, trace_flags=flags, trace_state=state)
    return api.set_span_in_context(api.NonRecordingSpan(span), Context())


def _text(value: Any, length: int | None = None) -> Any:
    """Return the beginning of a text of a client or a handler, in what UTF-8 can encode."""
    if not isinstance(value, str):
        return value
    return value[:length].encode("utf-8", "replace").decode()
