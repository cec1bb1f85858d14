import json
import math
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from fed_decoder import Decoder
from hypothesis import example, given
from hypothesis import strategies as st

from marserve.backend.framing import VERSION, encode
from marserve.backend.protocol import (
    BatchCost,
    Call,
    CallReply,
    CancelCall,
    CancelPredict,
    EndSequence,
    Input,
    Load,
    Loaded,
    LoadFailure,
    LoadStarted,
    Message,
    NextBatch,
    Part,
    Piece,
    PiecesRead,
    Predict,
    Prediction,
    Profile,
    Profiled,
    ProtocolError,
    Reply,
    SetThreads,
    SpanRecord,
    ThreadsSet,
    Trials,
)

LIMIT = 1 << 20
PREDICT, REPLY, LOAD = 1, 2, 10
KINDS = range(1, 19)

texts = st.text(max_size=20)
bodies = st.binary(max_size=300)
headers = st.dictionaries(texts, texts, max_size=3)
parts = st.builds(Part, texts, texts, bodies.map(bytearray))
inputs = st.builds(Input, texts, headers, st.lists(parts, max_size=3))
predictions = st.builds(Prediction, bodies, st.integers(), texts, headers)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
rows_of_metrics = st.lists(st.lists(json_values, max_size=3), max_size=3)
costs = st.builds(BatchCost, st.integers(), st.floats(0, 100), st.integers())
profiled = st.builds(Profiled, st.lists(costs, max_size=3), texts, st.integers(), texts)
spans = st.builds(
    SpanRecord,
    texts,
    texts,
    texts,
    texts,
    st.floats(0, 9),
    st.floats(0, 9),
    st.dictionaries(texts, texts | st.booleans() | st.integers() | st.floats(0, 9), max_size=3),
    texts,
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Load,
        model_name=texts,
        model_dir=texts,
        handler=texts,
        batch_size=st.integers(),
        gpu_id=st.none() | st.integers(),
        limit_max_image_pixels=st.booleans(),
        max_response_bytes=st.integers(),
        server_version=texts,
        overlap_stages=st.booleans(),
        samples=st.lists(texts, max_size=3),
        trials=st.builds(
            Trials, sizes=st.lists(st.integers(1, 64), max_size=3), seconds=st.floats(0, 100)
        ),
    ),
    st.just(LoadStarted()),
    st.builds(
        Loaded,
        rows_of_metrics,
        st.integers(0, 99),
        st.booleans(),
        st.booleans(),
        st.booleans(),
        st.dictionaries(texts, json_values, max_size=3),
        st.dictionaries(texts, json_values, max_size=3),
        st.lists(texts, max_size=3),
        st.integers(),
        texts,
        profiled,
        st.dictionaries(texts, json_values, max_size=3),
    ),
    st.builds(LoadFailure, st.integers(), texts, st.booleans()),
    st.builds(
        Predict,
        st.lists(inputs, max_size=4),
        st.integers(),
        st.integers(),
        st.just(()) | st.lists(st.integers(), min_size=1, max_size=4),
    ),
    st.builds(
        Reply,
        st.integers(),
        texts,
        st.lists(predictions, max_size=4),
        rows_of_metrics,
        st.floats(0, 9),
        st.floats(0, 9),
        st.integers(),
        texts,
        st.integers(),
        texts,
        st.lists(st.integers(), max_size=3).map(tuple),
        st.lists(st.tuples(st.integers(), st.floats(0, 9)), max_size=3).map(tuple),
        st.floats(0, 9),
        texts,
        st.lists(spans, max_size=3).map(tuple),
    ),
    st.builds(
        Piece,
        st.lists(predictions, max_size=4),
        st.lists(st.integers(), max_size=4),
        st.integers(),
        texts,
        st.integers(),
    ),
    st.builds(NextBatch, st.integers()),
    profiled,
    st.builds(ThreadsSet, st.integers(), st.integers()),
    st.builds(
        Call,
        number=st.integers(),
        batch=st.integers(),
        model=texts,
        version=texts,
        timeout=st.none() | st.floats(allow_nan=False),
        headers=headers,
        parts=st.lists(parts, max_size=3),
    ),
    st.builds(CancelCall, st.integers()),
    st.builds(CancelPredict, st.integers()),
    st.builds(PiecesRead, st.integers(), st.integers()),
    st.builds(SetThreads, st.integers(), st.integers(), st.integers()),
    st.builds(EndSequence, st.text(), st.text(), st.integers()),
    st.builds(Profile, st.lists(st.integers()), st.floats(0, 9), st.floats(0, 9), st.integers()),
    st.builds(
        CallReply,
        st.integers(),
        st.none() | predictions,
        st.integers(),
        texts,
        texts,
        st.none() | st.integers(),
    ),
)


def joined(*sent: Message) -> bytes:
    return b"".join(bytes(buffer) for message in sent for buffer in encode(message))


def frame(
    meta: Any, small: bytes = b"", *large: bytes, kind: int = REPLY, version: int = VERSION
) -> bytes:
    text = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    lengths = struct.pack(f"!{len(large)}I", *map(len, large))
    front = struct.pack("!BBII", version, kind, len(large), len(text)) + lengths + text + small
    return b"".join((struct.pack("!I", len(front)), front, *large))


def feed_in_pieces(data: bytes, sizes: Iterable[int], limit: int = LIMIT) -> list[Message]:
    decoder, received = Decoder(limit), []
    start = 0
    for size in sizes:
        received += decoder.feed(data[start : start + size])
        start += size
    return received + decoder.feed(data[start:])


@given(st.lists(messages, min_size=1, max_size=4))
def test_what_was_encoded_comes_out_again_in_order(sent):
    assert Decoder(LIMIT).feed(joined(*sent)) == sent


@given(st.lists(messages, min_size=1, max_size=3))
def test_byte_by_byte_is_the_same_as_at_once(sent):
    data = joined(*sent)
    assert feed_in_pieces(data, [1] * len(data)) == sent


@given(st.lists(messages, min_size=1, max_size=4), st.lists(st.integers(1, 400), max_size=30))
def test_any_pieces_are_the_same_as_at_once(sent, sizes):
    assert feed_in_pieces(joined(*sent), sizes) == sent


def decodes_or_refuses(data: bytes) -> None:
    decoder = Decoder(LIMIT)
    try:
        decoder.feed(data)
    except ProtocolError:
        return
    assert len(decoder.buffer) > 0  # where the rest would go


@given(st.binary(max_size=300))
@example(b"\0\0\0\0")
@example(b"\xff\xff\xff\xff")
def test_garbage_is_refused_or_waits_for_more(data):
    decodes_or_refuses(data)


@given(json_values, st.sampled_from(KINDS), bodies)
def test_a_frame_whose_meta_is_any_json_is_refused_or_read(meta, kind, body):
    decodes_or_refuses(frame(meta, body, kind=kind))


@given(messages, st.data())
def test_a_message_with_a_byte_changed_is_refused_or_read(sent, data):
    broken = bytearray(joined(sent))
    place = data.draw(st.integers(0, len(broken) - 1))
    broken[place] ^= data.draw(st.integers(1, 255))
    decodes_or_refuses(bytes(broken))


@pytest.mark.parametrize(
    "number",
    [
        math.nan,
        math.inf,
    ],
)
def test_a_number_that_is_none_is_refused(number):
    with pytest.raises(ProtocolError):
        Decoder(LIMIT).feed(frame([number, 0, [], []]))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (frame([0, 0, 0, [], []], version=1), "version 1, expected 8"),
        (frame([0, 0, 0, [], []], kind=99), "unknown kind of message: 99"),
        (
            frame([0, 0, 0, [], []], b"left"),
            "4 bytes of the frame belong to no body",
        ),
        (
            frame([0, 0, 0, [], [[5, 200, "", {}]]], b"four"),
            "5 bytes does not fit",
        ),
        (
            frame([0, 0, 0, [], [[-1, 200, "", {}]]], b"four"),
            "-1 bytes does not fit",
        ),
        (
            frame([0, 0, 0, [], [], 200, "", "", -1, "", [], [[1, 2, 3]], 0.0, ""]),
            "unreadable message",
        ),
        (frame([0, 0, 0, [], [], []]), "unreadable message of kind 2"),
        (frame(b"{"), "unreadable message of kind 2"),
        (frame(b"\xff"), "unreadable message of kind 2"),
        (frame(b"[" * 100_000), "unreadable message of kind 2"),
        (frame({"model_name": "x"}, kind=LOAD), "unreadable message of kind 10"),
        (struct.pack("!IBBII", 10, VERSION, REPLY, 0, 1), "1 bytes of meta do not fit"),
        (struct.pack("!IBBII", 10, VERSION, REPLY, 9, 0), "9 lengths do not fit"),
        (struct.pack("!I", 9), "a frame of 9 bytes, allowed are 10"),
        (frame([0, 0, 0, [], []], b"", b"x" * 16_384), "a large body of 16384 bytes"),
        (
            frame([0, 0, 0, [], []], b"", b"x" * 16_385),
            "16385 bytes of the frame belong to no body",
        ),
    ],
)
def test_what_breaks_the_rules_is_refused_with_its_reason(data, complaint):
    with pytest.raises(ProtocolError, match=complaint):
        Decoder(LIMIT).feed(data)


def test_a_frame_at_the_limit_passes_and_one_above_is_refused_by_its_length_alone():
    data = joined(Reply(message="x" * 100))
    length = len(data) - 4
    assert Decoder(length).feed(data)
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        Decoder(length - 1).feed(data[:4])


def test_a_frame_too_long_for_its_length_field_is_not_encoded():
    class Huge(bytes):
        def __len__(self):
            return 1 << 32

    with pytest.raises(ProtocolError, match="cannot be sent"):
        encode(Reply(predictions=[Prediction(Huge())]))


def test_a_plain_reply_does_not_carry_what_only_others_have():
    plain = len(joined(Reply(predictions=[Prediction(b"x")])))
    assert plain + len(',""') < len(joined(Reply(predictions=[Prediction(b"x")], raised_at="n")))


def test_a_large_body_is_received_in_place():
    """Once the front has arrived, the rest goes where it stays: no growing, no moving."""
    body = bytes(range(256)) * 4096
    front, large = encode(Reply(predictions=[Prediction(body)]))
    decoder = Decoder(2 * len(body))
    assert decoder.feed(front) == []
    room = decoder.buffer
    assert len(room) == len(body)
    assert large is body
    for start in range(0, 1_000_000, 100_000):
        decoder.buffer[:100_000] = body[start : start + 100_000]
        assert decoder.received(100_000) == []
    [reply] = decoder.feed(body[1_000_000:])
    assert isinstance(reply, Reply)
    assert reply.predictions[0].body is room.obj
    assert reply.predictions[0].body == body


def test_a_long_front_is_received_in_place():
    sent = Reply(predictions=[Prediction(b"x" * 16_000)] * 50)
    data = joined(sent)
    decoder = Decoder(2 * len(data))
    assert decoder.feed(data[:4]) == []
    room = decoder.buffer
    assert len(room) == len(data) - 4
    assert decoder.feed(data[4:-1]) == []
    assert decoder.buffer.obj is room.obj
    assert decoder.feed(data[-1:]) == [sent]


def test_large_bodies_are_counted_in_the_limit_of_a_frame():
    data = joined(Reply(predictions=[Prediction(b"x" * 20_000)] * 3))
    length = len(data) - 4
    assert Decoder(length).feed(data)
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        Decoder(length - 1).feed(data[:200])


def test_after_a_large_frame_the_decoder_gives_its_memory_back():
    decoder = Decoder(LIMIT)
    before = len(decoder.buffer)
    decoder.feed(joined(Reply(predictions=[Prediction(b"x" * 500_000)])))
    assert len(decoder.buffer) == before


def test_bodies_belong_to_the_message_not_to_the_receive_buffer():
    decoder = Decoder(LIMIT)
    [first] = decoder.feed(joined(Predict([Input("1", {}, [Part("a", "", b"first")])])))
    decoder.feed(joined(Predict([Input("2", {}, [Part("a", "", b"other")])])))
    assert isinstance(first, Predict)
    body = first.inputs[0].parts[0].body
    assert (body, type(body)) == (b"first", bytearray)


@given(st.integers(0, 70_000))
def test_a_body_of_any_length_around_the_scratch_buffer_comes_through(extra):
    sent = [Reply(predictions=[Prediction(b"x" * extra)]), Reply(message="next")]
    assert feed_in_pieces(joined(*sent), [65_536, 1, 3]) == sent


LARGE = bytes(range(256)) * 400  # more than a decoder reads at a time


@pytest.mark.parametrize(
    "bodies",
    [
        pytest.param([LARGE], id="one"),
        pytest.param([LARGE + b"!", b"", b"small"], id="the last is small"),
        pytest.param([b"small", LARGE], id="the last is large"),
        pytest.param([LARGE, b"", b""], id="empty ones behind it"),
        pytest.param([LARGE, LARGE], id="two halves"),
        pytest.param([LARGE, LARGE + LARGE], id="the last is most of it"),
    ],
)
def test_large_bodies_are_their_receivers_own(bodies):
    parts = [Part(str(place), "", body) for place, body in enumerate(bodies)]
    request = Predict([Input("id", {}, parts)], 7)
    decoder = Decoder(LIMIT)
    received = []
    rest = joined(request, request, Reply(number=8))
    while rest:
        count = min(len(rest), len(decoder.buffer))
        decoder.buffer[:count] = rest[:count]
        rest = rest[count:]
        received += decoder.received(count)
    assert received == [request, request, Reply(number=8)]
    for message in received[:2]:
        assert isinstance(message, Predict)
        for part in message.inputs[0].parts:
            assert type(part.body) is bytearray
            part.body += b"more"
    assert decoder.is_between_frames


@pytest.mark.parametrize("claimed", [len(LARGE) - 1, len(LARGE) + 1, -1])
def test_a_large_frame_with_a_body_of_another_length_is_refused(claimed):
    meta = [7, 0, [["id", {}, [["body", "", claimed]]]]]
    with pytest.raises(ProtocolError):
        Decoder(LIMIT).feed(frame(meta, b"", LARGE, kind=PREDICT))
