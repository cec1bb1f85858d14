"""The trace of a request, and the spans that a handler adds to it (`Context.span`).

A request belongs to a trace by its header ``traceparent`` of W3C Trace Context, of which
``00-<trace id>-<span id>-<flags>`` is version 00: https://www.w3.org/TR/trace-context/
"""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any, NamedTuple

from marserve.backend.protocol import SpanRecord

TRACEPARENT = "traceparent"
SAMPLED = 1  # a flag

_FORMAT = re.compile(
    # Version 00, or a later one, which may have further fields; ff is none.
    r"(?:00(?=.{53}\Z)|(?!00|ff)[0-9a-f]{2}(?=.{53}(?:-|\Z)))"
    "-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2}).*",
    re.DOTALL,
)
# Of a reply; more are dropped.
_MAX_ATTRIBUTES = 128
_MAX_SPANS = 1000
_MAX_TEXT = 1000  # characters
_MAX_BITS = 63  # of an int in OTLP


class Trace(NamedTuple):
    """The trace of a request; ``span_id`` is the parent of what the request causes."""

    trace_id: str
    span_id: str
    flags: int

    @property
    def sampled(self) -> bool:
        """Whether spans are recorded."""
        return bool(self.flags & SAMPLED)

    @property
    def traceparent(self) -> str:
        """The header."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse_traceparent(text: str) -> tuple[str, str, int] | None:
    """Return the fields of a `Trace`; None for a value that W3C Trace Context refuses.

    Of a version after 00 the same fields are read, and further fields ignored.
    """
    found = _FORMAT.fullmatch(text)
    return None if found is None else (found[1], found[2], int(found[3], 16))


def trace_of(headers: Mapping[str, Any]) -> Trace | None:
    """Return the trace that a header ``traceparent``, in any case, names; None for no trace."""
    text = headers.get(TRACEPARENT)
    if text is None:
        text = next((headers[name] for name in headers if name.lower() == TRACEPARENT), None)
    fields = parse_traceparent(text) if isinstance(text, str) else None
    return None if fields is None else Trace(*fields)


class Span(NamedTuple):
    """A span of a handler; its ``attributes`` may be changed until its block ends."""

    request: Trace | None
    trace: Trace | None  # with the id of the span, if the request is sampled
    attributes: dict[str, Any]

    @property
    def traceparent(self) -> str:
        """The header that makes requests to other services its children; empty without a trace."""
        return "" if self.trace is None else self.trace.traceparent


_current: ContextVar[Span | None] = ContextVar("current_span", default=None)


@contextmanager
def record_span(
    spans: list[SpanRecord], request: Trace | None, name: str, attributes: dict[str, Any]
) -> Iterator[Span]:
    """Add a span to ``spans`` at the end of the block, if the request is sampled.

    It is a child of the span of the same request whose block surrounds this one.
    """
    if request is None or not request.sampled:
        yield Span(request, request, attributes)
        return
    # Not of `random`, whose state forked processes share.
    trace = request._replace(span_id=os.urandom(8).hex())
    outer = _current.get()
    above = outer.trace if outer is not None and outer.request == request else None
    _current.set(span := Span(request, trace, attributes))
    started, error = time.monotonic(), ""
    try:
        yield span
    except BaseException as raised:
        error = f"{type(raised).__name__}: {_plain_text(raised)}"[:_MAX_TEXT]
        raise
    finally:
        # Not a token's reset, which fails where a generator ends in another context.
        _current.set(outer)
        ids = request.span_id, trace.span_id, (above or request).span_id
        moments = started, time.monotonic()
        first = islice(attributes.items(), _MAX_ATTRIBUTES)
        plain = {_plain_text(key): _plain(value) for key, value in first}
        if len(spans) < _MAX_SPANS:
            spans.append(SpanRecord(*ids, str(name)[:_MAX_TEXT], *moments, plain, error))


def _plain(value: Any) -> str | bool | int | float:
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _MAX_BITS):
        return value
    return _plain_text(value)


def _plain_text(value: Any) -> str:
    try:
        return str(value)[:_MAX_TEXT]
    except Exception:  # noqa: BLE001 - foreign code, and the request must not fail for it
        return type(value).__name__
