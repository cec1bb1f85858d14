import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import load_metrics_config, parse_metrics_config
from marserve.frontend.telemetry.metrics_log import Entry, MetricsLog
from marserve.frontend.telemetry.model_metrics import ModelMetrics

Lines = Callable[[], list[tuple[str, str]]]

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3} - ")


@pytest.fixture
def metrics():
    return Metrics("box", load_metrics_config(auto_detect=True))


@pytest.fixture
def lines(caplog):
    """Return logger and text of the lines since the last call, without the times."""
    caplog.set_level(logging.INFO)

    def taken():
        found = [
            (record.name, line)
            for record in caplog.records
            for line in record.getMessage().splitlines()
        ]
        caplog.clear()
        return [
            (name, re.sub(r"timestamp:\d{10,}$", "timestamp:T", TIME.sub("", line)))
            for name, line in found
        ]

    return taken


def cats(value: float, *ids: str) -> list[Any]:
    return ["counter", "Cats", "Count", value, [["ModelName", "m"], ["Level", "Model"]], list(ids)]


# -- what the server counts ------------------------------------------------------------------------


def test_a_counter_is_written_by_its_increment_and_only_when_it_changed(metrics, lines):
    log = MetricsLog(metrics, delayed=True)
    log.flush()
    assert lines() == []
    for count in (2, 3):
        for _ in range(count):
            metrics.count_response(200)
        log.flush()
        log.flush()
        assert lines() == [
            ("TS_METRICS", f"Requests2XX.Count:{count}.0|#Level:Host|#hostname:box,timestamp:T")
        ]


def test_a_gauge_is_written_by_its_value(metrics, lines):
    log = MetricsLog(metrics)
    for value in (0.0, 40.0, 30.0):
        metrics.queue_time.update(value)
        log.flush()
        log.flush()
        assert lines() == [
            ("TS_METRICS", f"QueueTime.Milliseconds:{value}|#Level:Host|#hostname:box,timestamp:T")
        ]


def test_a_histogram_is_written_by_the_mean_of_what_was_new(lines):
    entry = "{name: QueueTime, unit: ms, dimensions: [Level, Hostname]}"
    text = f"ts_metrics: {{histogram: [{entry}]}}\nmodel_metrics: {{}}"
    metrics = Metrics("box", parse_metrics_config(text.encode()))
    log = MetricsLog(metrics)
    for values, mean in (((1.0, 2.0), 1.5), ((7.0,), 7.0), ((0.0,), 0.0)):
        for value in values:
            metrics.queue_time.update(value)
        log.flush()
        log.flush()
        (line,) = [text for _, text in lines()]
        assert line == f"QueueTime.ms:{mean}|#Level:Host|#hostname:box,timestamp:T"


def test_the_time_of_a_prediction_is_among_the_models(metrics, lines):
    log = MetricsLog(metrics)
    model = ModelMetrics(metrics, "m", "1.0")
    model.batch_done(("id-1", "id-2"), 2, 0.25, 0.5, Reply(handler_ms=300.0))
    log.flush()
    expected = (
        "MODEL_METRICS",
        "PredictionTime.ms:300.0|#ModelName:m,Level:Model"
        "|#hostname:box,requestID:id-1,id-2,timestamp:T",
    )
    assert expected in lines()


def test_our_own_additions_are_for_prometheus_only(metrics, lines):
    log = MetricsLog(metrics)
    ModelMetrics(metrics, "m", "1.0").failed_batches.update(1)
    log.flush()
    assert lines() == []


@pytest.mark.parametrize(("legacy", "written"), [(False, 1), (True, 0)])
def test_the_legacy_log_leaves_out_the_counters_that_came_later(legacy, written, metrics, lines):
    log = MetricsLog(metrics, legacy=legacy)
    ModelMetrics(metrics, "m", "1.0").versioned.accepted()
    log.flush()
    assert len(lines()) == written


def test_what_a_model_counted_last_is_written_when_it_goes(metrics, lines):
    log = MetricsLog(metrics)
    for _ in range(2):
        model = ModelMetrics(metrics, "m", "1.0")
        model.versioned.accepted()
        model.close()
        assert [text.partition("|")[0] for _, text in lines()] == [
            "ts_inference_requests_total.Count:1.0"
        ]
    log.flush()
    assert lines() == []


# -- what is reported ------------------------------------------------------------------------------


def test_each_update_of_a_handler_is_a_line_with_the_ids_of_its_requests(metrics, lines):
    log = MetricsLog(metrics)
    model = ModelMetrics(metrics, "m", "1.0")
    rows = [cats(2.0, "id-1"), cats(2.0, "id-1", "id-2"), cats(0.5)]
    model.batch_done((), 2, 0, 0, Reply(metrics=rows))
    log.flush()
    assert [text for name, text in lines() if "Cats" in text and name == "MODEL_METRICS"] == [
        f"Cats.Count:{value}|#ModelName:m,Level:Model|#hostname:box,requestID:{ids},timestamp:T"
        for value, ids in ((2.0, "id-1"), (2.0, "id-1,id-2"), (0.5, "null"))
    ]


def test_the_updates_of_a_handler_do_not_pile_up(metrics, lines):
    log = MetricsLog(metrics)
    model = ModelMetrics(metrics, "m", "1.0")
    model.reported([cats(1.0)] * 600)
    assert sum("Cats" in text for _, text in lines()) == 512
    log.flush()
    assert sum("Cats" in text for _, text in lines()) == 88


def test_each_look_at_the_host_is_a_line(metrics, lines):
    log = MetricsLog(metrics)
    for _ in range(2):
        metrics.report_system("GPUUtilization", 7.0, "Host", "0")
    log.flush()
    line = "GPUUtilization.Percent:7.0|#Level:Host,DeviceId:0|#hostname:box,timestamp:T"
    assert lines() == [("TS_METRICS", line)] * 2


def test_a_value_cannot_forge_a_line(metrics, lines):
    log = MetricsLog(metrics)
    row = ["counter", "Cats", "Count", 2.0, [["ModelName", "a\nb\u2028c"]], []]
    ModelMetrics(metrics, "m", "1.0").batch_done((), 1, 0, 0, Reply(metrics=[row]))
    log.flush()
    (line,) = [text for _, text in lines() if "Cats" in text]
    assert r"ModelName:a\nb\u2028c|" in line


def test_lines_can_be_json(metrics, lines):
    log = MetricsLog(metrics, as_json=True)
    metrics.count_response(200)
    ModelMetrics(metrics, "m", "1.0").batch_done((), 1, 0, 0, Reply(metrics=[cats(2.0, "id-1")]))
    log.flush()
    by_name = {entry["MetricName"]: entry for entry in (json.loads(text) for _, text in lines())}
    cats_line = by_name["Cats"]
    assert cats_line.pop("Timestamp") > 1e9
    assert cats_line == {
        "MetricName": "Cats",
        "Value": 2.0,
        "Unit": "Count",
        "Type": "counter",
        "Dimensions": [{"Name": "ModelName", "Value": "m"}, {"Name": "Level", "Value": "Model"}],
        "HostName": "box",
        "RequestId": "id-1",
    }
    assert by_name["Requests2XX"]["RequestId"] is None


def test_a_logger_that_lets_nothing_through_costs_nothing(metrics, lines, caplog, monkeypatch):
    monkeypatch.delattr(Entry, "text")
    log = MetricsLog(metrics)
    caplog.set_level(logging.WARNING, "TS_METRICS")
    metrics.count_response(200)
    log.flush()
    assert lines() == []


def test_an_answer_that_was_counted_is_in_the_log(metrics, lines):
    MetricsLog(metrics)
    metrics.queue_time.update(2.0)
    metrics.count_response(200)
    assert [text.partition("|")[0] for _, text in lines()] == [
        "QueueTime.Milliseconds:2.0",
        "Requests2XX.Count:1.0",
    ]


def test_lines_of_very_many_answers_are_written_together_a_little_later(run, metrics, lines):
    async def scenario():
        MetricsLog(metrics, clock=asyncio.get_running_loop().time)
        for _ in range(1000):  # in one moment
            metrics.count_response(200)
        at_once = lines()
        assert 0 < len(at_once) < 100
        await asyncio.sleep(0.021)
        (rest,) = lines()
        assert rest[1].startswith(f"Requests2XX.Count:{1000 - len(at_once)}.0|")
        metrics.count_response(200)
        assert len(lines()) == 1

    run(scenario())


def test_up_to_250_answers_a_second_are_each_written_at_once(run, metrics, lines):
    async def scenario():
        MetricsLog(metrics, clock=asyncio.get_running_loop().time)
        for _ in range(200):
            metrics.count_response(200)
            assert len(lines()) == 1
            await asyncio.sleep(0.00401)

    run(scenario())


def test_it_is_written_each_second_and_once_more_at_the_end(run, metrics, lines):
    async def scenario():
        task = asyncio.create_task(MetricsLog(metrics, delayed=True).run())
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
