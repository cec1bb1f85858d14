"""Lists of a client that are taken apart (``dynamicBatchSize``), and the answers joined.

The first line of an input is the media type.
"""

import json

from fuzz.limits import Limits

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.rest.client_lists import read_list

LIMITS = Limits(calls=3_000, calls_per_byte=80, memory_per_byte=8_000)
_MAX_ROWS = 20


def target(data: bytes) -> None:
    """Each item is a row of its own, and the answers to the rows are answered as a list."""
    line, _, body = data.partition(b"\n")
    media_type = line.decode("latin-1")
    request = Input("i", {"Content-Type": media_type}, [Part("body", media_type, body)])
    for envelope in ("", "kserve", "json", "kservev2"):
        rows = read_list(request, envelope, _MAX_ROWS)
        if rows is None:
            continue
        assert len(rows.rows) <= _MAX_ROWS + 1
        bodies = [bytes(row.parts[-1].body) for row in rows.rows]
        answer = rows.response([Prediction(each) for each in bodies])
        items = json.loads(bytes(answer.body))
        document = json.loads(body)
        sent = document["instances"] if isinstance(document, dict) else document
        found = items[rows.member] if rows.member else items
        if not rows.is_enveloped:
            assert repr(found) == repr(sent[: _MAX_ROWS + 1])  # not a number is no other one
