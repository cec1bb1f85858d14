"""Encode messages of `backend.protocol` as bytes, and decode them; without I/O and clock.

A frame is a front and the large bodies. The front is a fixed head, the lengths of the large bodies,
a JSON text that describes the message, and the small bodies. Bodies are raw and in order::

    0        4         5      6       10            14                                   length + 4
    +--------+---------+------+-------+-------------+-----------+-------------+-----------+--
    | length | version | kind | large | meta length | lengths   | meta (JSON) | small     | large
    |        |         |      |       |             | of large  |             | bodies    | bodies
    +--------+---------+------+-------+-------------+-----------+-------------+-----------+--
      u32      u8        u8     u32     u32           u32 each

``length`` is the number of bytes of the front that follow it, ``large`` the number of large bodies;
integers are big-endian. A body of more than 16 KiB is large: it is received into memory of its own,
where it stays. JSON is used because the C codec of the standard library converts a whole batch in
one call, and because it cannot run code, as pickle can.

Frames that break these rules raise `ProtocolError`; the connection cannot be used after that.
"""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from marserve.backend.protocol import (
    BatchCost,
    Buffer,
    Call,
    CallReply,
    CancelCall,
    CancelPredict,
    Compare,
    Compared,
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
)

VERSION = 8

_HEAD = struct.Struct("!IBBII")
LENGTH_BYTES = 4
_AFTER_LENGTH = struct.Struct("!BBII")
AFTER_LENGTH_BYTES = _AFTER_LENGTH.size
# Version, kind, number of large bodies, length of the JSON.
_Head = tuple[int, int, int, int]
_LARGE = 2

# A longer front does not share the receive buffer.
_SCRATCH_BYTES = 64 * 1024
# A longer body is large.
_SMALL_BYTES = 16 * 1024

Encoded = tuple[Any, Sequence[Buffer]]


def encode(message: Message) -> list[Buffer]:
    """Encode a message as the buffers of one frame: the front, and each large body as it is.

    Raises:
        ProtocolError: The frame would be 4 GiB or more.
        TypeError, ValueError: A value cannot be written as JSON.
    """
    kind, encoder = _ENCODERS[type(message)]
    meta, bodies = encoder(message)
    text = _to_json(meta).encode()
    lengths = list(map(len, bodies))
    length = AFTER_LENGTH_BYTES + len(text) + sum(lengths)
    if length >= 1 << 32:
        raise ProtocolError(f"a frame of {length} bytes cannot be sent")
    if not lengths or max(lengths) <= _SMALL_BYTES:
        return [b"".join((_HEAD.pack(length, VERSION, kind, 0, len(text)), text, *bodies))]
    small = [body for body in bodies if len(body) <= _SMALL_BYTES]
    large = [body for body in bodies if len(body) > _SMALL_BYTES]
    table = struct.pack(f"!{len(large)}I", *map(len, large))
    length = AFTER_LENGTH_BYTES + len(table) + len(text) + sum(map(len, small))
    head = _HEAD.pack(length, VERSION, kind, len(large), len(text))
    return [b"".join((head, table, text, *small)), *large]


def _encode_predict(predict: Predict) -> Encoded:
    inputs = [
        (
            request.id,
            request.headers,
            [(part.name, part.content_type, len(part.body)) for part in request.parts],
        )
        for request in predict.inputs
    ]
    meta: tuple[Any, ...] = predict.number, predict.run_as, inputs
    if predict.rows:
        meta += (predict.rows,)
    return meta, [part.body for request in predict.inputs for part in request.parts]


#: The fields of a reply that are sent only if one of them differs from its default.
_USUAL = (200, "", "", -1, "", (), (), 0.0, "", (), 0.0)


def _encode_reply(reply: Reply) -> Encoded:
    predictions = [(len(p.body), p.status, p.reason, p.headers) for p in reply.predictions]
    times = reply.handler_started, reply.handler_ms
    meta: tuple[Any, ...] = reply.number, *times, reply.metrics, predictions
    rare = (
        reply.code,
        reply.message,
        reply.poisoned,
        reply.suspect,
        reply.raised_at,
        reply.rows,
        reply.lengths,
        reply.length_seconds,
        reply.cause,
        reply.spans,
        reply.paused_ms,
    )
    if rare != _USUAL:
        meta += rare
    return meta, [prediction.body for prediction in reply.predictions]


def _encode_piece(piece: Piece) -> Encoded:
    predictions = [(len(p.body), p.status, p.reason, p.headers) for p in piece.predictions]
    meta = piece.number, piece.code, piece.message, piece.places, predictions
    return meta, [prediction.body for prediction in piece.predictions]


def _encode_call(call: Call) -> Encoded:
    parts = [(part.name, part.content_type, len(part.body)) for part in call.parts]
    meta = call.number, call.batch, call.model, call.version, call.timeout, call.headers, parts
    return meta, [part.body for part in call.parts]


def _encode_call_reply(reply: CallReply) -> Encoded:
    meta = reply.number, reply.status, reply.type, reply.message, reply.retry_after
    prediction = reply.prediction
    if prediction is None:
        return (*meta, None), []
    answer = len(prediction.body), prediction.status, prediction.reason, prediction.headers
    return (*meta, answer), [prediction.body]


class _Bodies:
    """The bodies of a frame in order: small ones from ``start`` of its front, and large ones."""

    def __init__(self, front: memoryview, start: int, large: Sequence[bytearray]) -> None:
        self._front = front
        self._at = start
        self._end = len(front)
        self._large = large
        self._taken = 0

    def take(self, length: int, copy: type[bytes] | type[bytearray] = bytes) -> bytes | bytearray:
        """Return the next body; a small one is a copy of this type."""
        start, end = self._at, self._at + length
        if not start <= end <= self._end or length > _SMALL_BYTES:
            return self._large_of(length)
        self._at = end
        return copy(self._front[start:end])

    def _large_of(self, length: int) -> bytearray:
        if length <= _SMALL_BYTES:
            raise ProtocolError(f"a body of {length} bytes does not fit its frame")
        place, self._taken = self._taken, self._taken + 1
        if place >= len(self._large) or len(self._large[place]) != length:
            raise ProtocolError(f"a large body of {length} bytes is not in its frame")
        return self._large[place]

    def finish(self) -> None:
        left = self._end - self._at + sum(map(len, self._large[self._taken :]))
        if left:
            raise ProtocolError(f"{left} bytes of the frame belong to no body")


def _decode_predict(meta: Any, bodies: _Bodies) -> Predict:
    number, run_as, inputs, *rows = meta
    take = bodies.take
    return Predict(
        [
            Input(id_, headers, [Part(name, kind, take(n, bytearray)) for name, kind, n in parts])
            for id_, headers, parts in inputs
        ],
        int(number),
        int(run_as),
        [int(count) for count in rows[0]] if rows else (),
    )


def _decode_reply(meta: Any, bodies: _Bodies) -> Reply:
    number, started, handler_ms, metrics, predictions, *rare = meta
    reply = Reply(
        200,
        "",
        _predictions(predictions, bodies),
        list(metrics),
        float(handler_ms),
        float(started),
        int(number),
    )
    if rare:
        code, message, poisoned, suspect, raised_at, rows, lengths, seconds, *rare = rare
        cause, spans, paused_ms = rare
        reply.code, reply.message, reply.poisoned = int(code), str(message), str(poisoned)
        reply.suspect, reply.raised_at = int(suspect), str(raised_at)
        reply.rows = tuple(map(int, rows))
        reply.lengths = tuple((int(place), float(length)) for place, length in lengths)
        reply.length_seconds, reply.cause = float(seconds), str(cause)
        reply.paused_ms = float(paused_ms)
        reply.spans = tuple(
            SpanRecord(str(a), str(b), str(c), str(d), float(start), float(end), dict(e), str(f))
            for a, b, c, d, start, end, e, f in spans
        )
    return reply


def _decode_piece(meta: Any, bodies: _Bodies) -> Piece:
    number, code, message, places, predictions = meta
    return Piece(
        _predictions(predictions, bodies),
        [int(place) for place in places],
        int(code),
        str(message),
        int(number),
    )


def _predictions(described: Any, bodies: _Bodies) -> list[Prediction]:
    take = bodies.take
    return [Prediction(take(n), int(s), str(r), dict(h)) for n, s, r, h in described]


def _reader_of(hint: Any) -> Callable[[Any], Any]:
    kind, items = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return record_reader(hint)
    if kind is list:
        read = _reader_of(items[0])
        return lambda values: [read(value) for value in values]
    if kind is UnionType:  # with None
        read = _reader_of(items[0])
        return lambda value: None if value is None else read(value)
    if hint is BatchCost:
        return lambda values: BatchCost(int(values[0]), float(values[1]), int(values[2]))
    return (lambda value: value) if hint is Any else (kind or hint)


def _decode_record(read: Callable[[Any], Message], meta: Any, _bodies: _Bodies) -> Message:
    return read(meta)


def record_reader(record: Any) -> Callable[[Any], Any]:
    """Return a function that makes an object of a data class from the JSON of its fields."""
    hints = get_type_hints(record)
    readers = {each.name: _reader_of(hints[each.name]) for each in fields(record)}
    return lambda meta: record(**{name: read(meta[name]) for name, read in readers.items()})


def _decode_call(meta: Any, bodies: _Bodies) -> Call:
    number, batch, model, version, timeout, headers, parts = meta
    take = bodies.take
    return Call(
        int(number),
        int(batch),
        str(model),
        str(version),
        None if timeout is None else float(timeout),
        {str(name): str(value) for name, value in headers.items()},
        [Part(str(name), str(kind), take(n, bytearray)) for name, kind, n in parts],
    )


def _decode_call_reply(meta: Any, bodies: _Bodies) -> CallReply:
    number, status, type_, message, retry_after, answer = meta
    prediction = None if answer is None else _predictions([answer], bodies)[0]
    seconds = None if retry_after is None else int(retry_after)
    return CallReply(int(number), prediction, int(status), str(type_), str(message), seconds)


def _json_writer() -> Callable[[Any], str]:
    """Return a function that writes compact JSON.

    `json.JSONEncoder.encode` makes a new C encoder for each call, which costs more than writing a
    small batch (3.9 µs against 1.5).
    """
    encoder = json.JSONEncoder(separators=(",", ":"), check_circular=False)
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return encoder.encode
    # markers, default, encoder, indent, both separators, sort_keys, skipkeys, allow_nan
    escape = json.encoder.encode_basestring_ascii
    pieces = make(None, encoder.default, escape, None, ":", ",", False, False, True)
    return lambda value: "".join(pieces(value, 0))


def _from_json(text: str) -> Any:
    """Read JSON that begins at once, which saves a search for white space."""
    value, end = _read_json(text)
    if end != len(text) and text[end:].strip(" "):
        raise ValueError(f"{len(text) - end} characters behind the JSON")
    return value


_to_json = _json_writer()
_read_json = json.JSONDecoder().raw_decode

# Messages without bodies, which are sent so rarely that their fields are sent by name.
_RECORDS = (
    Load,
    LoadStarted,
    Loaded,
    LoadFailure,
    EndSequence,
    Profile,
    Profiled,
    SetThreads,
    ThreadsSet,
    CancelPredict,
    PiecesRead,
    Compare,
    Compared,
)
_FIRST_RECORD = 10
_ENCODERS: dict[type, tuple[int, Callable[[Any], Encoded]]] = {
    Predict: (1, _encode_predict),
    Reply: (2, _encode_reply),
    Piece: (3, _encode_piece),
    NextBatch: (4, lambda request: (request.number, ())),
    Call: (5, _encode_call),
    CallReply: (6, _encode_call_reply),
    CancelCall: (7, lambda cancelled: (cancelled.number, ())),
    **{
        record: (kind, lambda message: (asdict(message), ()))
        for kind, record in enumerate(_RECORDS, _FIRST_RECORD)
    },
}
_DECODERS: dict[int, Callable[[Any, _Bodies], Message]] = {
    1: _decode_predict,
    2: _decode_reply,
    3: _decode_piece,
    4: lambda number, _bodies: NextBatch(int(number)),
    5: _decode_call,
    6: _decode_call_reply,
    7: lambda number, _bodies: CancelCall(int(number)),
}
for _kind, _record in enumerate(_RECORDS, _FIRST_RECORD):
    _DECODERS[_kind] = partial(_decode_record, record_reader(_record))

_UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)


def _decode(front: memoryview, head: _Head, large: Sequence[bytearray] = ()) -> Message:
    version, kind, count, meta_length = head
    if version != VERSION:
        raise ProtocolError(f"protocol version {version}, expected {VERSION}")
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise ProtocolError(f"unknown kind of message: {kind}")
    start = AFTER_LENGTH_BYTES + count * LENGTH_BYTES
    end = start + meta_length
    if end > len(front):
        raise ProtocolError(f"{meta_length} bytes of meta do not fit a front of {len(front)}")
    bodies = _Bodies(front, end, large)
    try:
        message = decoder(_from_json(str(front[start:end], "utf-8")), bodies)
    except _UNREADABLE as error:
        raise ProtocolError(f"unreadable message of kind {kind}: {error}") from error
    bodies.finish()
    return message


class _Arriving:
    """A frame whose front has arrived: receives its large bodies, each into its own memory."""

    def __init__(self, front: memoryview, head: _Head, lengths: Sequence[int]) -> None:
        self._front = front
        self._head = head
        self._lengths = iter(lengths)
        self._bodies: list[bytearray] = []
        self._filled = 0  # of the last one
        self.is_complete = False
        self._begin_next()

    def _begin_next(self) -> None:
        length = next(self._lengths, None)
        if length is None:
            self.is_complete = True
        else:
            self._bodies.append(bytearray(length))
            self._filled = 0

    @property
    def space(self) -> memoryview:
        """The space for the next bytes of an incomplete body."""
        return memoryview(self._bodies[-1])[self._filled :]

    def received(self, count: int) -> None:
        """Accept bytes in `space`."""
        self._filled += count
        if self._filled == len(self._bodies[-1]):
            self._begin_next()

    def take(self, data: memoryview) -> int:
        """Copy bytes that were received with the front; return how many belong to the frame."""
        taken = 0
        while taken < len(data) and not self.is_complete:
            space = self.space
            count = min(len(space), len(data) - taken)
            space[:count] = data[taken : taken + count]
            taken += count
            self.received(count)
        return taken

    def message(self) -> Message:
        """Decode the complete frame."""
        return _decode(self._front, self._head, self._bodies)


class Decoder:
    """Decodes messages from a stream of bytes in pieces of any size.

    The caller fills `buffer` from its front and calls `received` with the count. A large body, and
    a front longer than the shared buffer, are received in place. ``max_frame_bytes`` may be raised
    later.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._store = self._scratch = bytearray(_SCRATCH_BYTES)
        self._filled = 0
        self._arriving: _Arriving | None = None

    @property
    def is_between_frames(self) -> bool:
        """Whether no message has been received in part."""
        return not self._filled and self._arriving is None

    @property
    def buffer(self) -> memoryview:
        """The space for the next bytes; never empty."""
        if self._arriving is not None:
            return self._arriving.space
        return memoryview(self._store)[self._filled :]

    def received(self, count: int) -> list[Message]:
        """Accept ``count`` new bytes in `buffer`; return the messages that are complete."""
        messages: list[Message] = []
        if (arriving := self._arriving) is not None:
            arriving.received(count)
            if arriving.is_complete:
                self._arriving = None
                messages.append(arriving.message())
            return messages
        self._filled += count
        start = 0
        view = memoryview(self._store)
        while (end := self._end_of_front(view, start)) is not None and end <= self._filled:
            front = view[start + LENGTH_BYTES : end]
            start = end
            head = _AFTER_LENGTH.unpack_from(front)
            if not head[_LARGE]:
                messages.append(_decode(front, head))
                continue
            arriving = _Arriving(front, head, self._large_lengths(front, head[_LARGE]))
            start += arriving.take(view[end : self._filled])
            if not arriving.is_complete:  # its front stays in the store, which is not used
                self._arriving = arriving
                break
            messages.append(arriving.message())
        self._keep_from(start)
        return messages

    def _end_of_front(self, view: memoryview, start: int) -> int | None:
        if self._filled - start < LENGTH_BYTES:
            return None
        length = int.from_bytes(view[start : start + LENGTH_BYTES], "big")
        if not AFTER_LENGTH_BYTES <= length <= self.max_frame_bytes:
            raise self._wrong(length)
        return start + LENGTH_BYTES + length

    def _large_lengths(self, front: memoryview, count: int) -> Sequence[int]:
        if AFTER_LENGTH_BYTES + count * LENGTH_BYTES > len(front):
            raise ProtocolError(f"{count} lengths do not fit a front of {len(front)}")
        lengths = struct.unpack_from(f"!{count}I", front, AFTER_LENGTH_BYTES)
        if min(lengths) <= _SMALL_BYTES:
            raise ProtocolError(f"a large body of {min(lengths)} bytes")
        length = len(front) + sum(lengths)
        if length > self.max_frame_bytes:
            raise self._wrong(length)
        return lengths

    def _wrong(self, length: int) -> ProtocolError:
        allowed = f"{AFTER_LENGTH_BYTES} to {self.max_frame_bytes}"
        return ProtocolError(f"a frame of {length} bytes, allowed are {allowed}")

    def _keep_from(self, start: int) -> None:
        """Move the incomplete front to the beginning of a large enough buffer."""
        left = self._filled - start
        self._filled = left
        if not left:  # the usual case: the peer waits for our answer
            self._store = self._scratch
            return
        needed = _SCRATCH_BYTES
        if left >= LENGTH_BYTES:
            length = int.from_bytes(self._store[start : start + LENGTH_BYTES], "big")
            needed = max(needed, LENGTH_BYTES + length)
        if start == 0 and needed <= len(self._store):
            return
        store = self._scratch if needed == _SCRATCH_BYTES else bytearray(needed)
        store[:left] = self._store[start : start + left]
        self._store = store
