"""Metrics as lines of text: printed by handlers, and by the command that measures the host.

    [METRICS]NAME.UNIT:VALUE|#dimension:value,…|#type:GAUGE|#hostname:HOST,EPOCH_S,REQUEST_ID,…

The command leaves ``[METRICS]`` out. The type and the request ids may be missing. A dimension that
is not ``name:value`` is dropped, as in TorchServe.
"""

import math
import re
from typing import Any

_MARK = "[METRICS]"

_LINE = re.compile(
    r"\s*(?P<name>[\w ]+)\.(?P<unit>[\w ]+):(?P<value>[-\d,.e]+)"
    r"\|#(?P<dimensions>[^|]*)"
    r"(?:\|#type:(?P<kind>\w+))?"
    r"\|#hostname:(?P<hostname>[^,|]+),(?P<timestamp>\d+)(?:,(?P<request_ids>.*))?\s*",
    re.ASCII,
)


def parse_metric_line(line: str) -> list[Any] | None:
    """Read a line into a row (`handler_metrics`), whose type may be any word; else None."""
    match = _LINE.fullmatch(line.partition(_MARK)[2] if _MARK in line else line)
    if match is None:
        return None
    try:
        value = float(match["value"])
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    pairs = (part.split(":") for part in match["dimensions"].split(","))
    dimensions = [[pair[0].strip(), pair[1]] for pair in pairs if len(pair) == 2]
    ids = match["request_ids"] or "null"
    request_ids = [] if ids == "null" else ids.split(",")
    kind = (match["kind"] or "").lower()
    return [kind, match["name"], match["unit"], value, dimensions, request_ids]
