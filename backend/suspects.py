"""Finds the input that a handler was processing when it raised, by the frames of the traceback.

Most handlers process rows one by one. The suspect is the row in the innermost frame whose local
variables hold exactly one row, or a value of exactly one. It is a hint: the variable of a loop that
has ended holds the last row, and Python 3.12 loses that of a list comprehension (PEP 709).

Objects are compared by identity, because ``__eq__`` is foreign code. No frame is kept.
"""

import inspect
from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

# Limits for deep recursions and generated code.
_MAX_FRAMES = 64
_MAX_LOCALS = 256
_MAX_CHARACTERS = 200


def suspect_of(
    error: BaseException, rows: Sequence[Mapping[str, Any]], count: int
) -> tuple[int, str]:
    """Return the place of the suspected input, -1 if unknown, and where the error was raised.

    ``rows`` beyond ``count`` are copies of the last one. The text has the line that raised, that of
    the frame that names the suspect, and the type of the error.
    """
    frames = _innermost(error.__traceback__)
    place_of = _places(rows, count) if frames else {}
    for frame, line in reversed(frames):
        place = _only_place(frame, place_of)
        if place is not None:
            raised, raised_line = frames[-1]
            text = f"{_position(raised, raised_line)} {_position(frame, line)}"
            return place, f"{text} {type(error).__name__}"[:_MAX_CHARACTERS]
    return -1, ""


def _innermost(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    """Return the last frames of a traceback, without the first, which is ours, and their lines."""
    frames = []
    while traceback is not None and (traceback := traceback.tb_next) is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
    return frames[-_MAX_FRAMES:]


def _places(rows: Sequence[Mapping[str, Any]], count: int) -> dict[int, int]:
    """Return the places of rows and of their values, by identity; -1 if several rows share one."""
    place_of: dict[int, int] = {}
    for number, row in enumerate(rows):
        place = min(number, count - 1)
        for item in (row, *row.values()):
            if place_of.setdefault(id(item), place) != place:
                place_of[id(item)] = -1
    return place_of


def _only_place(frame: FrameType, place_of: Mapping[int, int]) -> int | None:
    """Return the place of the only row in the frame's local variables; None if there are others."""
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return None  # of a class or of exec(), whose mapping may be foreign code
    values = frame.f_locals
    if len(values) > _MAX_LOCALS:
        return None
    places = {place_of.get(id(value), -1) for value in values.values()}
    places.discard(-1)
    return places.pop() if len(places) == 1 else None


def _position(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{line}"
