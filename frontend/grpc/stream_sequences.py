"""The sequences that a stream of requests has asked for: they end if it is broken off."""

from typing import Protocol

_MIN_LIMIT = 64


class StatefulModel(Protocol):
    """A model version, as far as it matters here."""

    def has_sequence(self, sequence_id: str) -> bool:
        """Whether there is such a sequence."""

    def leave_sequence(self, sequence_id: str) -> None:
        """Note that the client of a sequence is gone for good."""


class StreamSequences:
    """Those of one stream; it may last for days, so those that are over are forgotten."""

    def __init__(self) -> None:
        self._used: set[tuple[StatefulModel, str]] = set()
        self._limit = _MIN_LIMIT

    def __len__(self) -> int:
        return len(self._used)

    def add(self, model: StatefulModel, sequence_id: str) -> None:
        """A request of a sequence was answered."""
        if model.has_sequence(sequence_id):
            self._used.add((model, sequence_id))
        if len(self._used) > self._limit:  # twice those that are left: each is looked at seldom
            self._used = {(each, id_) for each, id_ in self._used if each.has_sequence(id_)}
            self._limit = max(_MIN_LIMIT, 2 * len(self._used))

    def leave(self) -> None:
        """The stream is broken off."""
        for model, sequence_id in self._used:
            model.leave_sequence(sequence_id)
