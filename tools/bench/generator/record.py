"""What a load generator saw: one entry per request, small and quick to write."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

_DOUBLE = 8  # bytes


def _doubles() -> "array[float]":
    return array("d")


@dataclass
class Record:
    """Requests that came to an end, in the order of their ends.

    Moments are those of `time.monotonic`, which all processes of a machine share.

    Attributes:
        ended: When each successful answer was complete.
        latencies: Seconds from when it was due; as many, in the same order.
        failed: When each other request came to its end.
        kinds: What became of it: a status ("503") or what happened ("connection reset").
        lateness: Of an open loop: seconds that the generator itself was late, per request.
        busy: Share of the time in which the generator had a processor, from 0 to 1; the busiest
            process of several.
        stopped: Why the load ended early; empty if it did not.
    """

    ended: "array[float]" = field(default_factory=_doubles)
    latencies: "array[float]" = field(default_factory=_doubles)
    failed: "array[float]" = field(default_factory=_doubles)
    kinds: list[str] = field(default_factory=list)
    lateness: "array[float]" = field(default_factory=_doubles)
    busy: float = 0.0
    stopped: str = ""

    def fail(self, now: float, kind: str) -> None:
        """A request came to a bad end."""
        self.failed.append(now)
        self.kinds.append(kind)

    @property
    def count(self) -> int:
        """Requests that came to an end."""
        return len(self.ended) + len(self.failed)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """A line that says what follows, and what follows."""
        arrays = self.arrays
        document = {
            "lengths": list(map(len, arrays)),
            "kinds": self.kinds,
            "busy": self.busy,
            "stopped": self.stopped,
        }
        return json.dumps(document).encode() + b"\n", b"".join(item.tobytes() for item in arrays)

    @staticmethod
    def body_length(line: bytes) -> int:
        """How many bytes follow the line."""
        lengths: list[int] = json.loads(line)["lengths"]
        return _DOUBLE * sum(lengths)

    @classmethod
    def from_bytes(cls, line: bytes, body: bytes) -> "Record":
        """Reads what `to_bytes` wrote."""
        document = json.loads(line)
        record = cls(kinds=document["kinds"], busy=document["busy"], stopped=document["stopped"])
        at = 0
        for values, length in zip(record.arrays, document["lengths"], strict=True):
            values.frombytes(body[at : at + _DOUBLE * length])
            at += _DOUBLE * length
        return record

    def extend(self, other: "Record") -> None:
        """Add another's; no longer in the order of ends."""
        for into, values in zip(self.arrays, other.arrays, strict=True):
            into.extend(values)
        self.kinds += other.kinds
        self.busy = max(self.busy, other.busy)
        self.stopped = self.stopped or other.stopped

    @property
    def arrays(self) -> Sequence["array[float]"]:
        """All the numbers."""
        return (self.ended, self.latencies, self.failed, self.lateness)
