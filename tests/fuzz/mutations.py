"""Changed seeds, as a strategy of hypothesis."""

import re
from collections.abc import Callable, Sequence

from fuzz import catalog
from hypothesis import strategies as st

_MAX_BYTES = 4_096
_MAX_CHANGES = 5


def inputs(name: str) -> st.SearchStrategy[bytes]:
    """Inputs for a target: seeds, mostly with a few changes."""
    return _mutated(list(catalog.seeds(name).values()), catalog.words())


@st.composite
def _mutated(draw: st.DrawFn, seeds: Sequence[bytes], words: Sequence[bytes]) -> bytes:
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, _MAX_CHANGES))):
        start = draw(_place(data))
        end = draw(st.integers(start, min(len(data), start + draw(st.sampled_from(_SPANS)))))
        found = data[start:end]
        match draw(st.integers(0, 6)):
            case 0:
                new = b""
            case 1:
                new = draw(st.binary(min_size=1, max_size=draw(st.sampled_from((1, 4, 64)))))
            case 2 | 3:
                new = draw(st.sampled_from(words))
            case 4:
                new = found + draw(st.sampled_from(words)) + found
            case 5:
                new = found * draw(st.sampled_from((2, 3, 10, 100)))
            case _:
                other = draw(st.sampled_from(seeds))
                at = draw(st.integers(0, len(other)))
                new = found + other[at : at + draw(st.sampled_from(_SPANS))]
        data = (data[:start] + new + data[end:])[:_MAX_BYTES]
    return data


def _place(data: bytes) -> st.SearchStrategy[int]:
    """Where a change begins: anywhere, or where something of a format does."""
    anywhere = st.integers(0, len(data))
    behind = [found.end() for found in _SEPARATOR.finditer(data)]
    return anywhere | st.sampled_from(behind) if behind else anywhere


_SEPARATOR = re.compile(rb"[\n&;,:={\[\"/]")
_SPANS = (0, 1, 2, 4, 8, 16, 64, 256)


def shortest(data: bytes, fails: Callable[[bytes], bool]) -> bytes:
    """A part of an input that still fails, from which no piece can be taken away."""
    size = len(data)
    while size := size // 2:
        at = 0
        while at < len(data):
            shorter = data[:at] + data[at + size :]
            if fails(shorter):
                data = shorter
            else:
                at += size
    return data
