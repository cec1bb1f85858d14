"""Lists of a client that are taken apart (``dynamicBatchSize``), and the answers joined.

The first line of an input is the media type.
"""

import json
from typing import TypeVar

from fuzz.limits import Limits

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.aio.json_items import JsonItems, json_items
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.rows import in_blocks
from marserve.frontend.operations.client_lists import read_list

T = TypeVar("T")

LIMITS = Limits(calls=5_000, calls_per_byte=80, memory_per_byte=8_000)
_MAX_ROWS = 20
# Behind so many blanks a text is a large one, which Python's parser does not see as a whole.
_BLANKS = b" " * (1 << 16)


def target(data: bytes) -> None:
    """Each item is a row of its own, and the answers to the rows are answered as a list."""
    line, _, body = data.partition(b"\n")
    _compare(body)
    media_type = line.decode("latin-1")
    request = Input("i", {"Content-Type": media_type}, [Part("body", media_type, body)])
    for envelope in ("", "kserve", "json", "kservev2"):
        rows = _done(read_list(request, envelope, _MAX_ROWS))
        if rows is None:
            continue
        assert len(rows.rows) <= _MAX_ROWS + 1
        bodies = [bytes(row.parts[-1].body) for row in in_blocks(rows.rows)[0]]
        answer = _done(rows.join([Prediction(each) for each in bodies]))
        items = json.loads(bytes(answer.body))
        found = items[rows.member] if rows.member else items
        if not rows.is_enveloped:
            assert repr(found) == repr(_sent(body))  # not a number is no other one


def _sent(body: bytes) -> object:
    document = json.loads(body)
    return (document["instances"] if isinstance(document, dict) else document)[: _MAX_ROWS + 1]


def _compare(body: bytes) -> None:
    """What Python's parser takes is found without it, too; it is stricter behind the list."""
    found = _done(json_items(body, _MAX_ROWS))
    if found is not None and body.isascii() and b"\0" not in body:  # else perhaps UTF-16
        large = _done(json_items(_BLANKS + body, _MAX_ROWS))
        assert large is not None
        assert large.are_instances == found.are_instances
        assert _items(large) == _items(found)


def _items(found: JsonItems) -> list[str]:
    return [repr(json.loads(bytes(text))) for text in found.texts]


def _done(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as finished:
            result: T = finished.value
            return result
