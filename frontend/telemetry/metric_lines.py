"""Metrics as lines of text: printed by handlers, and by the command that measures the host.

    [METRICS]NAME.UNIT:VALUE|#dimension:value,…|#type:GAUGE|#hostname:HOST,EPOCH_S,REQUEST_ID,…

The command leaves ``[METRICS]`` out. The type and the request ids may be missing; a type that is
missing is for metrics.yaml to say. A dimension that is not ``name:value`` is dropped, as in
TorchServe.
"""

import math
import re
from dataclasses import dataclass
from typing import Any

MARK = "[METRICS]"

_LINE = re.compile(
    r"\s*(?P<name>[\w ]+)\.(?P<unit>[\w ]+):(?P<value>[-\d,.e]+)"
    r"\|#(?P<dimensions>[^|]*)"
    r"(?:\|#type:(?P<kind>\w+))?"
    r"\|#hostname:(?P<hostname>[^,|]+),(?P<timestamp>\d+)(?:,(?P<request_ids>.*))?\s*",
    re.ASCII,
)


@dataclass(frozen=True)
class MetricLine:
    """What a line says; ``kind`` may be any word, and is empty where the line has none."""

    name: str
    unit: str
    value: float  # for a counter, the increment
    dimensions: tuple[tuple[str, str], ...]
    kind: str
    request_ids: tuple[str, ...]

    @property
    def row(self) -> list[Any]:
        """The same as handlers' metrics are sent in a reply."""
        pairs = [list(pair) for pair in self.dimensions]
        return [self.kind, self.name, self.unit, self.value, pairs, list(self.request_ids)]


def parse_metric_line(line: str) -> MetricLine | None:
    """Read a line; None if it is no metric."""
    match = _LINE.fullmatch(line.partition(MARK)[2] if MARK in line else line)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    request_ids = match["request_ids"] or "null"
    return MetricLine(
        name=match["name"],
        unit=match["unit"],
        value=value,
        dimensions=_dimensions(match["dimensions"]),
        kind=(match["kind"] or "").lower(),
        request_ids=() if request_ids == "null" else tuple(request_ids.split(",")),
    )


def _dimensions(text: str) -> tuple[tuple[str, str], ...]:
    pairs = (part.split(":") for part in text.split(","))
    return tuple((pair[0].strip(), pair[1]) for pair in pairs if len(pair) == 2)
