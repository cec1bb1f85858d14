"""Filling a batch up to a size that the model was compiled for, and keeping the filling here.

The rows that are missing are the last input again: whatever shape and type a handler expects, it
finds it there, and no handler needs to know. The repeats have ids of their own, so that a handler
can tell its rows apart by id; no client can have chosen one of these.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from marserve.backend.protocol import Input, Part

_MARK = f"padding-{os.urandom(8).hex()}-"
_IDS = 5  # where a metric's row names the requests it is about


def padded(inputs: Sequence[Input], rows: int) -> list[Input]:
    """Append repeats of the last input until there are ``rows`` in all."""
    missing = range(len(inputs), rows)
    return [*inputs, *repeats(inputs[-1], (f"{_MARK}{place}" for place in missing))]


def repeats(request: Input, ids: Iterable[str]) -> list[Input]:
    """Copy an input under each of these ids; bodies too, since handlers may change theirs."""
    return [
        Input(
            id_,
            request.headers,
            [Part(part.name, part.content_type, bytearray(part.body)) for part in request.parts],
        )
        for id_ in ids
    ]


def without_padding(rows: Iterable[list[Any]]) -> list[list[Any]]:
    """Take the padding out of what the handler reported.

    Args:
        rows: Metrics as of `backend.metrics`; what is about padding alone is dropped.
    """
    kept = []
    for row in rows:
        ids = [id_ for id_ in row[_IDS] if not id_.startswith(_MARK)]
        if ids or not row[_IDS]:
            kept.append([*row[:_IDS], ids])
    return kept
