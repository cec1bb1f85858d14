"""The sequences of a stream of requests, which end if the stream breaks off."""

import asyncio
from typing import Protocol, Self

_MIN_LIMIT = 64
#: grpc.aio may end the requests of a cancelled call before it cancels the task (grpcio 1.85).
_SECONDS_TO_CANCEL = 0.5


class StatefulModel(Protocol):
    """A model version with sequences."""

    def has_sequence(self, sequence_id: str) -> bool:
        """Return whether a sequence is open."""

    def leave_sequence(self, sequence_id: str) -> None:
        """End a sequence whose client has left."""


class StreamSequences:
    """The open sequences of one stream, for an ``async with`` block that answers the stream.

    If sequences are open at the end of the requests, the block ends a moment later, to find out
    whether the client has cancelled the call. A stream may last for days, so ended sequences are
    removed from time to time.
    """

    def __init__(self) -> None:
        self._used: set[tuple[StatefulModel, str]] = set()
        self._limit = _MIN_LIMIT

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        is_broken_off = kind is not None
        try:
            if not is_broken_off and any(model.has_sequence(id_) for model, id_ in self._used):
                await asyncio.sleep(_SECONDS_TO_CANCEL)
        except asyncio.CancelledError:
            is_broken_off = True
            raise
        finally:
            for model, sequence_id in self._used if is_broken_off else ():
                model.leave_sequence(sequence_id)

    def __len__(self) -> int:
        return len(self._used)

    def add(self, model: StatefulModel, sequence_id: str | None) -> None:
        """Add the sequence of a request that was answered; does nothing without an id."""
        if sequence_id and model.has_sequence(sequence_id):
            self._used.add((model, sequence_id))
        if (
            len(self._used) > self._limit
        ):  # twice those that are left, so that each is checked rarely
            self._used = {(each, id_) for each, id_ in self._used if each.has_sequence(id_)}
            self._limit = max(_MIN_LIMIT, 2 * len(self._used))
