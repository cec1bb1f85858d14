"""Which requests belong to a trace, which are recorded, and the headers that their handlers get."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from opentelemetry.trace import TraceState

from marserve.frontend.telemetry.trace_context import NO_SAMPLING, Sampling

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
ALWAYS, NEVER = Sampling(1.0), Sampling(0.0)


def test_without_a_header_and_without_sampling_there_is_no_trace():
    assert NO_SAMPLING.context_of({"tracestate": "a=b"}) is None


@pytest.mark.parametrize("text", [SAMPLED, UNSAMPLED, f"cc-{TRACE}-{SPAN}-01-more"])
def test_without_sampling_the_headers_pass_through(text):
    trace = NO_SAMPLING.context_of({"traceparent": text})
    assert trace is not None
    assert (trace.trace_id, trace.is_recorded) == (TRACE, False)
    headers = {"X-A": "1", "TraceParent": text}
    assert trace.applied_to(headers) is headers
    assert (
        trace.headers["traceparent"] == f"00-{TRACE}-{SPAN}-{'00' if text == UNSAMPLED else '01'}"
    )
    assert trace.caused() is trace


@pytest.mark.parametrize("text", ["nonsense", f"00-{'0' * 32}-{SPAN}-00", f"00-{TRACE}-{SPAN}-0"])
def test_a_wrong_header_passes_through_and_has_no_id(text):
    trace = NO_SAMPLING.context_of({"traceparent": text, "tracestate": "a=b"})
    assert trace is not None
    assert (trace.trace_id, trace.headers, trace.is_recorded) == ("", {}, False)
    started = ALWAYS.context_of({"traceparent": text})
    assert started is not None
    assert started.is_recorded


@pytest.mark.parametrize(
    ("ratio", "is_parent_based", "text", "is_recorded"),
    [
        (0.0, True, SAMPLED, True),
        (1.0, True, UNSAMPLED, False),
        (1.0, False, UNSAMPLED, True),
        (0.0, False, SAMPLED, False),
        (0.7, False, SAMPLED, True),  # the share is that of the id
        (0.6, False, SAMPLED, False),
        (1.0, True, "nonsense", True),
        (0.0, True, "nonsense", False),
    ],
)
def test_the_sampling_decides_as_that_of_opentelemetry(ratio, is_parent_based, text, is_recorded):
    trace = Sampling(ratio, is_parent_based).context_of({"traceparent": text})
    assert (trace is not None and trace.is_recorded) == is_recorded


def test_a_recorded_request_has_a_span_of_its_own():
    trace = NEVER.context_of({"traceparent": SAMPLED, "tracestate": "a=b"})
    assert trace is not None
    assert trace.parent_id == SPAN != trace.span_id
    own = {"traceparent": f"00-{TRACE}-{trace.span_id}-01", "tracestate": "a=b"}
    headers = {"X-A": "1", "TraceParent": SAMPLED, "TraceState": "a=b"}
    assert trace.applied_to(headers) == {"X-A": "1", **own}


def test_a_request_that_is_caused_is_a_child():
    outer = NEVER.context_of({"traceparent": SAMPLED.replace("-01", "-03"), "tracestate": "a=b"})
    assert outer is not None
    caused = outer.recorded()
    assert caused.parent_id == outer.span_id != caused.span_id
    assert (caused.trace_id, caused.flags, caused.state) == (TRACE, 3, "a=b")


MEMBERS = ",".join(f"a{number}=b" for number in range(10, 43))


@pytest.mark.parametrize(
    ("state", "passed"),
    [
        ("a=b", "a=b"),
        (f"a={'b' * 256},c={'d' * 251}", f"a={'b' * 256},c={'d' * 251}"),
        (f"a={'b' * 256},c={'d' * 252}", ""),
        ("a=" + "b" * 257, ""),
        ("A=b", ""),
        ("nonsense", ""),
        (MEMBERS[:-6], MEMBERS[:-6]),
        (MEMBERS, ""),
        ("a=b,a=c", ""),
        ("1a=x", ""),
        ("1a@b=x", "1a@b=x"),
        ("1a@2=x", ""),
        ("a@b@c=x", ""),
        (f"a@{'b' * 15}=x", ""),
        (" a=b ,\t,, c= d", "a=b,c= d"),
        (",", ""),
    ],
)
def test_a_tracestate_within_the_limits_is_passed_on(state, passed):
    trace = ALWAYS.context_of({"traceparent": SAMPLED, "tracestate": state})
    assert trace is not None
    assert trace.state == passed


# Short texts of the characters that the rule is about, and lengths at its limits.
KEYS = st.text("a1@_A ", min_size=1, max_size=4) | st.sampled_from(
    ["a" * 256, "a" * 257, f"{'1' * 241}@a", f"{'1' * 242}@a", f"1@{'a' * 14}", f"1@{'a' * 15}"]
)
VALUES = st.sampled_from(["x", "", " x", "x ", "x\ty", "x=y", "~", "\x7f", "x" * 256, "x" * 257])
MEMBERS_OF_ANY_KIND = st.tuples(KEYS, st.just("="), VALUES).map("".join) | st.sampled_from(
    ["", " ", "a", "=", "\t"]
)


@given(st.lists(MEMBERS_OF_ANY_KIND, max_size=4).map(",".join))
def test_a_tracestate_is_passed_on_if_opentelemetry_accepts_it_without_a_line(text):
    trace = ALWAYS.context_of({"traceparent": SAMPLED, "tracestate": text})
    assert trace is not None
    logged = logging.getLogger("opentelemetry")
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logged.addHandler(handler)
    try:
        passed = TraceState.from_header([trace.state]).to_header()
        assert records == []
        assert passed == trace.state
        found = TraceState.from_header([text]).to_header()
        assert trace.state == ("" if len(text) > 512 else found)
    finally:
        logged.removeHandler(handler)


def test_a_tracestate_without_a_trace_is_dropped():
    trace = ALWAYS.context_of({"traceparent": "nonsense", "tracestate": "a=b"})
    assert trace is not None
    assert trace.applied_to({"tracestate": "a=b"}) == trace.headers
    assert list(trace.headers) == ["traceparent"]


def test_a_header_that_is_sent_twice():
    headers = CIMultiDict([("Traceparent", SAMPLED), ("tracestate", "a=b"), ("tracestate", "c=d")])
    trace = NEVER.context_of(headers)
    assert trace is not None
    assert trace.state == "a=b,c=d"
    headers.add("traceparent", SAMPLED)
    assert NEVER.context_of(headers) is None


def test_a_share_of_the_requests_starts_a_trace():
    sampling = Sampling(0.01)
    started = [trace for _ in range(20_000) if (trace := sampling.context_of({}))]
    assert 100 < len(started) < 320  # 200 are expected; this is seven times the deviation
    assert len({trace.trace_id for trace in started}) == len(started)
    # As the sampler traceidratio decides by the id, in any other service.
    assert all(int(trace.trace_id[16:], 16) < 0.01 * 2**64 for trace in started)
    assert {(trace.parent_id, trace.flags) for trace in started} == {("", 3)}
