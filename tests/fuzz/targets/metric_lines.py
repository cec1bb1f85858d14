r"""What a worker prints: lines of a log, and lines that are metrics, in pieces of any size."""

import asyncio
import logging
import os
from collections import deque

from fuzz.limits import Limits
from prometheus_client.parser import text_string_to_metric_families
from steps import page_of

from marserve.frontend.telemetry.handler_metrics import HandlerMetrics, ModelRows, parse_metric_line
from marserve.frontend.telemetry.metrics_config import MetricsConfig
from marserve.frontend.telemetry.series import Registry
from marserve.frontend.workers.launchers.output import OutputLog

LIMITS = Limits(calls=10_000, calls_per_byte=400)
_PIPE_BYTES = 60_000


def target(data: bytes) -> None:
    """Every line is logged or becomes a metric, and the page of metrics can be read."""
    data = data[:_PIPE_BYTES]
    registry = Registry()
    rows = ModelRows(HandlerMetrics(registry, "host", MetricsConfig({}, {}, keeps_undeclared=True)))
    lines: list[str] = []
    logged = asyncio.run(_logged(data, lines))
    for line in lines:
        row = parse_metric_line(line)
        if row is not None:
            rows.record([row])
    list(text_string_to_metric_families(page_of(registry)))
    # Carriage returns at the ends of lines are dropped.
    texts = data.decode(errors="backslashreplace").split("\n")
    expected = [text.rstrip("\r")[:300] for text in texts if not _is_metric(text)]
    if not texts[-1]:
        expected.pop()
    assert logged == expected


def _is_metric(line: str) -> bool:
    return line.startswith(("[METRICS]", "INFO > [METRICS]"))


async def _logged(data: bytes, metric_lines: list[str]) -> list[str]:
    reading, writing = os.pipe()
    last_lines = deque[str]()
    output = OutputLog(
        os.fdopen(reading, "rb"), logging.DEBUG, "w", metric_lines.append, last_lines
    )
    try:
        third = len(data) // 3
        for piece in (data[:third], data[third:]):
            os.write(writing, piece)
            await asyncio.sleep(0)
    finally:
        os.close(writing)
        output.close()
    return list(last_lines)
