"""Which of the recorded requests count: the measured part of a run."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.record import Record


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The part of a run that counts.

    Attributes:
        seconds: How long it lasted.
        latencies: Of the successful answers, seconds, in ascending order.
        errors: The others, by what became of them.
        timeline: Successful answers in each whole second.
    """

    seconds: float
    latencies: Sequence[float]
    errors: Mapping[str, int]
    timeline: Sequence[int]


def measured_part(record: Record, load: Load, warm: float) -> Measured:
    """What counts of a run.

    Args:
        record: Of the run.
        load: That was put on the server.
        warm: The moment when the warm-up was over.
    """
    if load.clients:
        began, ended = _closed(record, load, warm)
        counted = (began, ended)
    else:
        began, ended = _open(record, load, warm)
        counted = (warm, math.inf)
    chosen = zip(record.ended, record.latencies, strict=True)
    failed = zip(record.failed, record.kinds, strict=True)
    return Measured(
        seconds=ended - began,
        latencies=sorted(latency for moment, latency in chosen if _within(moment, counted)),
        errors=Counter(kind for moment, kind in failed if _within(moment, counted)),
        timeline=_by_second(record.ended, began, ended),
    )


def _within(moment: float, counted: tuple[float, float]) -> bool:
    return counted[0] < moment <= counted[1]


def _closed(record: Record, load: Load, warm: float) -> tuple[float, float]:
    """From an answer to an answer, of all processes together; of a round the last.

    The clock of each process starts no sooner, and it does not stop earlier, so that all load is on
    in between.
    """
    moments = sorted((*record.ended, *record.failed))[load.step - 1 :: load.step]
    if not moments:
        return warm, warm
    first = min(bisect_left(moments, warm), len(moments) - 1)
    if load.seconds is not None:
        last = bisect_left(moments, moments[first] + load.seconds)
    else:
        assert load.requests is not None
        last = first + -(-load.requests // load.step)
    return moments[first], moments[min(last, len(moments) - 1)]


def _open(record: Record, load: Load, warm: float) -> tuple[float, float]:
    """All that was due is recorded, and only that.

    It lasts as long as requests were due, and longer where the server fell behind: from the first
    answer to the last. How long each took is no matter: a slow server may well keep pace.
    """
    assert load.rate is not None
    moments = sorted((*record.ended, *record.failed))
    if not moments:
        return warm, warm
    behind = moments[-1] - moments[0]
    return warm, warm + max(behind, load.measured_requests / load.rate)


def _by_second(moments: Sequence[float], began: float, ended: float) -> list[int]:
    """Whole seconds only: what is left over would look like a server that slows down."""
    counts = [0] * int(ended - began)
    for moment in moments:
        second = math.floor(moment - began)
        if moment > began and second < len(counts):
            counts[second] += 1
    return counts
