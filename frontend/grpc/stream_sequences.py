"""The sequences of a stream of requests, which end if the stream breaks off."""

from typing import Protocol, Self

_MIN_LIMIT = 64


class StatefulModel(Protocol):
    """A model version with sequences."""

    def has_sequence(self, sequence_id: str) -> bool:
        """Return whether a sequence is open."""

    def leave_sequence(self, sequence_id: str) -> None:
        """End a sequence whose client has left."""


class StreamSequences:
    """The open sequences of one stream, for a ``with`` block in which the stream is answered.

    A stream may last for days, so ended sequences are removed from time to time.
    """

    def __init__(self) -> None:
        self._used: set[tuple[StatefulModel, str]] = set()
        self._limit = _MIN_LIMIT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            for model, sequence_id in self._used:
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
