import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_log import MetricsLog

Lines = Callable[[], list[tuple[str, str]]]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("box")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """Logger and text of what was written since the last call, without the time."""
    caplog.set_level(logging.INFO)

    def taken() -> list[tuple[str, str]]:
        found = [
            (record.name, re.sub(r"timestamp:\d{10,}$", "timestamp:T", record.getMessage()))
            for record in caplog.records
        ]
        caplog.clear()
        return found

    return taken


def test_a_counter_is_written_by_its_increment_and_only_when_it_changed(
    metrics: Metrics, lines: Lines
) -> None:
    log = MetricsLog(metrics)
    log.write()
    assert lines() == []
    for count in (2, 3):
        for _ in range(count):
            metrics.count_response(200)
        log.write()
        log.write()
        assert lines() == [
            ("TS_METRICS", f"Requests2XX.Count:{count}.0|#Level:Host|#hostname:box,timestamp:T")
        ]


def test_a_gauge_is_written_by_its_value(metrics: Metrics, lines: Lines) -> None:
    log = MetricsLog(metrics)
    for value in (40.0, 30.0):
        metrics.queue_time.labels("Host", "box").set(value)
        log.write()
        assert (
            "TS_METRICS",
            f"QueueTime.Milliseconds:{value}|#Level:Host|#hostname:box,timestamp:T",
        ) in lines()


def test_what_handlers_report_has_a_log_of_its_own(metrics: Metrics, lines: Lines) -> None:
    row = ["counter", "Cats", "Count", 2, [["ModelName", "m"], ["Level", "Model"]], "id"]
    metrics.handler_metrics.record([row])
    MetricsLog(metrics).write()
    assert lines() == [
        (
            "MODEL_METRICS",
            "Cats.Count:2.0|#ModelName:m,Level:Model|#hostname:box,requestID:null,timestamp:T",
        )
    ]


def test_our_own_additions_are_for_prometheus_only(metrics: Metrics, lines: Lines) -> None:
    metrics.for_model("m", "1.0").batch_failed()
    MetricsLog(metrics).write()
    assert lines() == []


@pytest.mark.parametrize(("legacy", "written"), [(False, 1), (True, 0)])
def test_the_legacy_log_leaves_out_the_counters_that_came_later(
    legacy: bool, written: int, metrics: Metrics, lines: Lines
) -> None:
    metrics.for_model("m", "1.0").versioned.accepted()
    MetricsLog(metrics, legacy=legacy).write()
    assert len(lines()) == written


def test_it_is_written_each_second_and_once_more_at_the_end(
    run: Callable[..., Any], metrics: Metrics, lines: Lines
) -> None:
    async def scenario() -> None:
        task = asyncio.create_task(MetricsLog(metrics).run())
        metrics.count_response(200)
        await asyncio.sleep(1.1)
        assert len(lines()) == 1
        metrics.count_response(404)
        await asyncio.sleep(0.1)
        assert lines() == []
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert len(lines()) == 1

    run(scenario())
