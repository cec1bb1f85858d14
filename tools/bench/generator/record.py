"""The record of a load generator: one compact entry per request."""

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

_DOUBLE = 8  # bytes


def _doubles() -> "array[float]":
    return array("d")


@dataclass
class Record:
    """Finished requests in the order of their ends.

    Moments are those of `time.monotonic`, which all processes of a machine share.

    Attributes:
        ended: When each successful answer was complete.
        latencies: Seconds from the due moment to the answer, in the same order as ``ended``.
        failed: When each failed request ended.
        kinds: The status ("503") or cause ("connection reset") of each failure.
        lateness: Open loop: seconds by which the generator sent each request late.
        busy: Processor time of the generator as a share of the time, from 0 to 1; the largest one
            of several processes.
        stopped: Why the load ended early; empty if it did not.
    """

    ended: "array[float]" = field(default_factory=_doubles)
    latencies: "array[float]" = field(default_factory=_doubles)
    failed: "array[float]" = field(default_factory=_doubles)
    kinds: list[str] = field(default_factory=list)
    lateness: "array[float]" = field(default_factory=_doubles)
    busy: float = 0.0
    stopped: str = ""

    def end(self, now: float, due: float, kind: str) -> None:
        """Record an answer; ``kind`` is empty for a success."""
        if kind:
            self.fail(now, kind)
        else:
            self.ended.append(now)
            self.latencies.append(now - due)

    def fail(self, now: float, kind: str) -> None:
        """Record a failed request."""
        self.failed.append(now)
        self.kinds.append(kind)

    @property
    def count(self) -> int:
        """Return the number of finished requests."""
        return len(self.ended) + len(self.failed)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """Return a line of JSON with the lengths of the arrays, and the bytes of the arrays."""
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
        """Return the number of bytes that follow the line."""
        lengths: list[int] = json.loads(line)["lengths"]
        return _DOUBLE * sum(lengths)

    @classmethod
    def from_bytes(cls, line: bytes, body: bytes) -> "Record":
        """Parse the result of `to_bytes`."""
        document = json.loads(line)
        record = cls(kinds=document["kinds"], busy=document["busy"], stopped=document["stopped"])
        at = 0
        for values, length in zip(record.arrays, document["lengths"], strict=True):
            values.frombytes(body[at : at + _DOUBLE * length])
            at += _DOUBLE * length
        return record

    def extend(self, other: "Record") -> None:
        """Append another record; the result is not in the order of ends."""
        for into, values in zip(self.arrays, other.arrays, strict=True):
            into.extend(values)
        self.kinds += other.kinds
        self.busy = max(self.busy, other.busy)
        self.stopped = self.stopped or other.stopped

    @property
    def arrays(self) -> Sequence["array[float]"]:
        """Return the arrays in the order of `to_bytes`."""
        return (self.ended, self.latencies, self.failed, self.lateness)
