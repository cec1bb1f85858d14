"""The header ``traceparent``, and spans of handlers without a server."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.protocol import Input, Predict, Reply, SpanRecord
from marserve.backend.service import Service
from marserve.backend.spans import Trace, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def make():
    def make(*headers):
        context = Context("kitten", "/m", None, 1, None, "1.0")
        context.request_processor = [RequestProcessor(each) for each in headers]
        return context

    return make


@pytest.fixture
def context(make):
    return make({"traceparent": SAMPLED})


# -- the header ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (SAMPLED, 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 255),
        (f"01-{TRACE}-{SPAN}-03", 3),  # of a version to come
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", 1),
        (f"cc-{TRACE}-{SPAN}-01-", 1),
    ],
)
def test_what_w3c_accepts_is_read(text, flags):
    found = parse_traceparent(text)
    assert found == (TRACE, SPAN, flags)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"000-{TRACE}-{SPAN}-01",
        f"0x-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN.upper()}-01",
        f"0A-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0A",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}0-{SPAN}-01",
        f"00-{TRACE}-{SPAN[1:]}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-001",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01.more",
        f"01-{TRACE}-{SPAN}-01more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f" {SAMPLED}",
        f"{SAMPLED} ",
        f"{SAMPLED}\n",
        f"{SAMPLED},{SAMPLED}",
        SAMPLED.replace("-", "_"),
        SAMPLED.replace("4", "٤"),
    ],
)
def test_what_w3c_refuses_is_no_trace(text):
    assert parse_traceparent(text) is None


@given(st.text(max_size=60) | st.from_regex("[0-9a-f-]{50,60}") | st.just(SAMPLED), st.data())
def test_a_trace_that_is_read_is_written_as_the_same_text(text, data):
    place = data.draw(st.integers(0, len(text)))
    changed = text[:place] + data.draw(st.characters()) + text[place + 1 :]
    for each in (text, changed):
        if (found := parse_traceparent(each)) and each.startswith("00"):
            assert Trace(*found).traceparent == each


# -- spans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["traceparent", "Traceparent", "TRACEPARENT"])
def test_a_handler_gets_the_trace_of_a_request(make, name):
    context = make({}, {"data": {"content-type": "text/plain"}, name: SAMPLED})
    assert context.trace() is None
    trace = context.trace(1)
    assert trace is not None
    assert (trace.trace_id, trace.span_id, trace.sampled) == (TRACE, SPAN, True)
    with pytest.raises(IndexError):
        context.trace(2)


def test_spans_are_children_of_the_request_or_of_the_block_around_them(context):
    with context.span("outer", words=3) as outer:
        with context.span("inner"):
            pass
        outer.attributes["more"] = True
    with context.span("next"):
        pass
    inner, whole, following = context.take_spans()
    assert [each.name for each in (inner, whole, following)] == ["inner", "outer", "next"]
    assert {each.request for each in (inner, whole, following)} == {SPAN}
    assert inner.parent_id == whole.span_id
    assert whole.parent_id == following.parent_id == SPAN
    assert whole.attributes == {"words": 3, "more": True}
    assert outer.traceparent == f"00-{TRACE}-{whole.span_id}-01"
    assert whole.started <= inner.started <= inner.ended <= whole.ended <= following.started
    assert context.take_spans() == ()


def test_an_exception_ends_a_span_and_goes_on(context):
    with pytest.raises(ValueError, match="no"), context.span("outer"), context.span("inner"):
        raise ValueError("no")
    assert [each.error for each in context.take_spans()] == 2 * ["ValueError: no"]


@pytest.mark.parametrize("headers", [{}, {"traceparent": f"00-{TRACE}-{SPAN}-00"}])
def test_a_request_that_is_not_sampled_records_nothing(make, headers):
    context = make(headers)
    with context.span("outer") as span:
        span.attributes["more"] = True
    assert span.traceparent == headers.get("traceparent", "")
    assert context.take_spans() == ()


def test_there_is_no_trace_without_a_batch():
    context = Context("kitten", "/m", None, 1, None, "1.0")
    with context.span("loading"):
        assert context.trace() is None
    assert context.take_spans() == ()


def test_a_span_of_another_request_is_no_child(make):
    other = SAMPLED.replace(SPAN, SPAN[::-1])
    context = make({"traceparent": SAMPLED}, {"traceparent": other})
    with context.span("one"), context.span("two", 1):
        pass
    two, one = context.take_spans()
    assert (two.parent_id, one.parent_id) == (SPAN[::-1], SPAN)


def test_threads_have_their_own_blocks(context):
    def inside():
        with context.span("thread"):
            pass

    with context.span("main"):
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
    assert [each.parent_id for each in context.take_spans()] == 2 * [SPAN]


def test_attributes_are_numbers_or_short_texts(context):
    with context.span("x", idx=0, a=1, b=2**70, c=None, d=[1], e="y" * 9999, f=0.5, name="n"):
        pass
    [span] = context.take_spans()
    texts = {"b": str(2**70), "c": "None", "d": "[1]", "e": "y" * 1000, "name": "n"}
    assert span.attributes == {"a": 1, "f": 0.5, **texts}


def test_endless_spans_are_dropped(context):
    for _ in range(1100):
        with context.span("again"):
            pass
    assert len(context.take_spans()) == 1000


@pytest.mark.parametrize("derive", [Context.for_batch, Context.for_request])
def test_contexts_of_single_batches_have_their_own_spans(context, derive):
    one, two = derive(context), derive(context)
    for number, each in enumerate((one, two)):
        each.request_processor = [RequestProcessor({"traceparent": SAMPLED})]
        with each.span(str(number)):
            pass
    assert names(one.take_spans()) == ["0"]
    assert names(two.take_spans()) == ["1"]
    assert context.take_spans() == ()


def handle(data: list[object], context: Context) -> list[str]:
    for place in range(len(data)):
        with context.span(f"row {place}", place):
            if place == 1:
                raise ValueError("no")
    return ["answer"] * len(data)


def serve(*headers: dict[str, str], run_as: int = 0) -> Reply:
    inputs = [Input(str(place), each, []) for place, each in enumerate(headers)]
    context = Context("kitten", "/m", None, 4, None, "1.0")
    return Service(handle, context).predict(Predict(inputs, run_as=run_as))


def test_spans_are_in_the_reply_and_those_of_padding_are_not():
    assert names(serve({"traceparent": SAMPLED}).spans) == ["row 0"]
    assert serve({}).spans == ()


def test_a_failure_has_the_spans_so_far_and_names_the_traces(caplog):
    other = SAMPLED.replace(TRACE, TRACE[::-1])
    reply = serve({"traceparent": SAMPLED}, {"traceparent": f"{other[:-1]}0"}, run_as=2)
    assert reply.code == 503
    assert names(reply.spans) == ["row 0"]
    assert f"Request ids: 0, 1 Trace ids: {TRACE}\n" in f"{caplog.text}"
    assert names(serve({"traceparent": SAMPLED}, run_as=2).spans) == ["row 0"]


def names(spans: tuple[SpanRecord, ...]) -> list[str]:
    return [each.name for each in spans]
