"""The measured part of a recorded run."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.generator.record import Record


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measured part of a run.

    Attributes:
        seconds: Length of the part.
        latencies: Latencies of the successful answers, seconds, ascending.
        errors: Numbers of failed requests by status or cause.
        timeline: Successful answers in each whole second.
    """

    seconds: float
    latencies: Sequence[float]
    errors: Mapping[str, int]
    timeline: Sequence[int]


def measured_part(record: Record, load: Load, warm: float) -> Measured:
    """Return the measured part of a run.

    Args:
        record: The record of the run.
        load: The load of the run.
        warm: The moment of the end of the warm-up.
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
    """Return start and end: the moments of answers, the last ones of a step, over all processes.

    No process starts its measurement before this start, or ends it before this end, so the whole
    load is on in between.
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
    """Return start and end; the record of an open loop contains exactly the measured requests.

    The length is that of the schedule, or from the first answer to the last if that is longer,
    because the server fell behind. Long latencies alone do not change it.
    """
    assert load.rate is not None
    moments = sorted((*record.ended, *record.failed))
    if not moments:
        return warm, warm
    behind = moments[-1] - moments[0]
    return warm, warm + max(behind, load.measured_requests / load.rate)


def _by_second(moments: Sequence[float], began: float, ended: float) -> list[int]:
    """Count answers by whole seconds; a partial last second would look like a slower server."""
    counts = [0] * int(ended - began)
    for moment in moments:
        second = math.floor(moment - began)
        if moment > began and second < len(counts):
            counts[second] += 1
    return counts
