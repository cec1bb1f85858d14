"""Trace contexts of requests, by W3C Trace Context, and which requests are recorded.

Without OpenTelemetry (`tracing.otel`) the headers of a client only pass through. With it, a request
that is sampled is *recorded*: it has a span of its own, the parent of what the request causes.
"""

import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from multidict import CIMultiDict

from marserve.backend.spans import SAMPLED, TRACEPARENT, Trace, parse_traceparent

_TRACESTATE = "tracestate"
# The usual traceparent of a request that is not sampled.
_UNSAMPLED = re.compile("00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[02]")
# A longer state is dropped, as W3C Trace Context allows.
_MAX_STATE = 512
# Members as W3C Trace Context writes them. The rule is that of OpenTelemetry's `TraceState`, which
# logs a line for each state that it does not accept.
_MAX_MEMBERS = 32
_MEMBER = re.compile(
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[ -+\--<>-~]{0,255}[!-+\--<>-~]"
)
_RANDOM = 2  # a flag
_LOW = 1 << 64  # the lower half of a trace id, at which the samplers of OpenTelemetry look
_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


class TraceContext(NamedTuple):
    """The place of a request in a trace.

    Attributes:
        span_id: Of the request, if it is recorded, else of the client.
        parent_id: The span above that of the request; empty for the first span of a trace.
        attributes: Of its span, from the transport; empty if another request has caused it.
    """

    trace_id: str
    span_id: str
    flags: int
    state: str = ""
    is_recorded: bool = False
    parent_id: str = ""
    attributes: Mapping[str, Any] = _NO_ATTRIBUTES

    def caused(self) -> "TraceContext":
        """Return the context of a request that this one causes."""
        return self.recorded()

    def recorded(self) -> "TraceContext":
        """Return the context of a recorded request in this one."""
        flags, own = self.flags | SAMPLED, os.urandom(8).hex()
        return TraceContext(self.trace_id, own, flags, self.state, True, self.span_id)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of what the request causes."""
        state = {_TRACESTATE: self.state} if self.state else {}
        return {TRACEPARENT: Trace(*self[:3]).traceparent, **state}

    def applied_to(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers that a handler gets, of those of a client."""
        names = (TRACEPARENT, _TRACESTATE)
        others = {name: text for name, text in headers.items() if name.lower() not in names}
        return {**others, **self.headers}


class ClientTrace:
    """The trace of a client's request that is not recorded: headers that pass through.

    They are parsed when the ids are needed; a wrong traceparent has none.
    """

    __slots__ = ("_parent", "_state")
    is_recorded = False

    def __init__(self, parent: str, state: str = "") -> None:
        self._parent = parent
        self._state = state

    @property
    def trace_id(self) -> str:
        """The id of the trace; empty without one."""
        fields = parse_traceparent(self._parent)
        return "" if fields is None else fields[0]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of what the request causes."""
        fields = parse_traceparent(self._parent)
        if fields is None:
            return {}
        trace_id, span_id, flags = fields
        state = _checked_state(self._state)
        return TraceContext(trace_id, span_id, flags & (SAMPLED | _RANDOM), state).headers

    def caused(self) -> "ClientTrace":
        """Return the trace of a request that this one causes."""
        return self

    def applied_to(self, headers: dict[str, str]) -> dict[str, str]:
        """Return the headers that a handler gets: those of the client."""
        return headers


RequestTrace = TraceContext | ClientTrace


@dataclass(frozen=True)
class Sampling:
    """Which requests are recorded: a share of them, or as the client has decided, if it has.

    With ``ratio`` None none are.
    """

    ratio: float | None = None
    is_parent_based: bool = True

    def context_of(self, headers: Mapping[str, str]) -> RequestTrace | None:
        """Return the trace of a request with these headers, by their names in lower case."""
        ratio = self.ratio
        text = _joined(headers, TRACEPARENT) if TRACEPARENT in headers else ""
        state = _joined(headers, _TRACESTATE) if text and _TRACESTATE in headers else ""
        if ratio is None:
            return ClientTrace(text, state) if text else None
        if self.is_parent_based and _UNSAMPLED.fullmatch(text):
            return ClientTrace(text, state)
        found = parse_traceparent(text) if text else None
        if found is None:
            if random.random() >= ratio:  # noqa: S311 - no secret
                return None
            low = int(random.random() * ratio * _LOW)  # noqa: S311 - no secret
            return TraceContext(f"{os.urandom(8).hex()}{low:016x}", "", _RANDOM).recorded()
        trace_id, span_id, flags = found
        is_sampled = flags & SAMPLED
        if not self.is_parent_based:
            is_sampled = int(trace_id[16:], 16) < round(ratio * _LOW)
        if not is_sampled:
            return ClientTrace(text, state)
        flags &= SAMPLED | _RANDOM
        return TraceContext(trace_id, span_id, flags, _checked_state(state)).recorded()


NO_SAMPLING = Sampling()


def _checked_state(text: str) -> str:
    """Return a ``tracestate`` without empty members; an empty text if it has a wrong one."""
    if len(text) > _MAX_STATE:
        return ""
    members = [member for part in text.split(",") if (member := part.strip(" \t"))]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in found if match is not None}  # none may be there twice
    return ",".join(members) if len(keys) == len(members) <= _MAX_MEMBERS else ""


def _joined(headers: Mapping[str, str], name: str) -> str:
    """Return the values of a header as one; a mapping of aiohttp may have several."""
    return headers[name] if type(headers) is dict else ",".join(CIMultiDict(headers).getall(name))
