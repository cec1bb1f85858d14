import logging

import fakes
import pytest
from steps import page_of

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.metrics import Metrics
from marserve.frontend.telemetry.metrics_config import load_metrics_config, parse_metrics_config
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.telemetry.series import WatchedGauge

HOST = {"Level": "Host", "Hostname": "host"}
MODEL = {"model_name": "m", "model_version": "1.0", "hostname": "host"}


@pytest.fixture
def metrics():
    return Metrics("host", load_metrics_config(auto_detect=True))


@pytest.fixture
def value():
    """Return the value of a sample on the page, by metrics, name and labels."""
    return fakes.sample_value


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (200, "Requests2XX"),
        (299, "Requests2XX"),
        (404, "Requests4XX"),
        (500, "Requests5XX"),
        (302, "Requests5XX"),
        (999, "Requests5XX"),
    ],
)
def test_answers_are_counted_by_the_class_of_their_status(status, name, metrics, value):
    metrics.count_response(status)
    counted = {
        each: value(metrics, each, HOST) for each in ("Requests2XX", "Requests4XX", "Requests5XX")
    }
    assert counted == {each: 1.0 if each == name else 0.0 for each in counted}


def test_requests_are_counted_under_the_version_their_url_names(metrics, value):
    model = ModelMetrics(metrics, "m", "1.0")
    model.versioned.accepted()
    model.unversioned.accepted()
    model.unversioned.answered(0.5, 2.0, ("id",))
    default = {**MODEL, "model_version": "default"}
    assert value(metrics, "ts_inference_requests_total", MODEL) == 1
    assert value(metrics, "ts_inference_requests_total", default) == 1
    assert value(metrics, "ts_queue_latency_microseconds", default) == 500_000
    assert value(metrics, "ts_inference_latency_microseconds", default) == 2_000_000


def test_a_batch_is_counted_with_its_size_and_its_times(metrics, value):
    cats = ["counter", "Cats", "Count", 2, [["ModelName", "m"]], []]
    reply = Reply(metrics=[cats], handler_ms=300.0)
    ModelMetrics(metrics, "m", "1.0").batch_done((), 3, 0.25, 0.5, reply)
    assert value(metrics, "marserve_batch_size_sum", MODEL) == 3
    assert value(metrics, "marserve_batch_seconds_sum", MODEL) == 0.5
    assert value(metrics, "QueueTime", HOST) == 250
    assert value(metrics, "WorkerThreadTime", HOST) == 200
    handler = {"ModelName": "m", "Level": "Model", "Hostname": HOST["Hostname"]}
    assert value(metrics, "PredictionTime", handler) == 300
    assert 'Cats{ModelName="m"' in page_of(metrics.registry)


def test_the_window_of_a_batch_is_counted_where_there_is_one(metrics, value):
    model = ModelMetrics(metrics, "m", "1.0")
    model.batch_done((), 3, 0.25, 0.5, Reply(), held=0.1)
    model.batch_done((), 3, 0.25, 0.5, Reply())  # a step of continuous batching
    assert value(metrics, "marserve_batch_window_seconds_sum", MODEL) == 0.1
    assert value(metrics, "marserve_batch_window_seconds_count", MODEL) == 1


def test_histograms_have_the_times_of_a_request_and_of_the_handler(metrics, value):
    model = ModelMetrics(metrics, "m", "1.0")
    model.versioned.answered(0.5, 2.0, ("id",))
    model.unversioned.answered(0.25, 1.0, ("id",))
    model.batch_done((), 2, 0.5, 1.5, Reply(handler_ms=300.0))
    sums = {
        name: value(metrics, f"marserve_{name}_seconds_sum", MODEL)
        for name in ("queue", "request", "handler")
    }
    assert sums == {"queue": 0.75, "request": 3.0, "handler": 0.3}
    assert value(metrics, "marserve_request_seconds_bucket", {**MODEL, "le": "1.0"}) == 1


def test_what_became_of_failed_batches_is_counted(metrics, value):
    model = ModelMetrics(metrics, "m", "1.0")
    model.isolated_batches.update(1)
    model.suspected_requests.update(1)
    model.retried_requests.update(3)
    assert value(metrics, "marserve_isolated_batches_total", MODEL) == 1
    assert value(metrics, "marserve_suspected_requests_total", MODEL) == 1
    assert value(metrics, "marserve_retried_requests_total", MODEL) == 3


def test_failures_rejections_and_loads_are_counted(metrics, value):
    model = ModelMetrics(metrics, "m", "1.0")
    model.failed_batches.update(1)
    model.worker_failures.update(1)
    model.rejected("queue_full")
    model.worker_loaded("W-1", 1.5)
    assert value(metrics, "marserve_failed_batches_total", MODEL) == 1
    assert value(metrics, "marserve_worker_failures_total", MODEL) == 1
    reason = {**MODEL, "reason": "queue_full"}
    assert value(metrics, "marserve_rejected_requests_total", reason) == 1
    assert value(metrics, "WorkerLoadTime", {"WorkerName": "W-1", **HOST}) == 1500
    for _ in range(2):
        model.worker_gone("W-1")
    assert "W-1" not in page_of(metrics.registry)


def test_a_watched_gauge_is_read_with_the_page(metrics):
    lengths = [3.0]
    gauge = WatchedGauge("queued", "Jobs", ["model"], lambda: [(["m"], lengths[0])])
    metrics.registry.watch(gauge)
    assert 'queued{model="m",} 3.0' in page_of(metrics.registry)
    lengths[0] = 4.0
    assert 'queued{model="m",} 4.0' in page_of(metrics.registry)


def test_names_are_torchserves_without_the_suffix_and_without_birthdays(metrics):
    metrics.count_response(200)
    text = page_of(metrics.registry)
    assert 'Requests2XX{Level="Host",Hostname="host",} 1.0' in text
    assert "_created" not in text


def test_declared_metrics_are_on_the_page_and_have_samples_after_updates(metrics):
    lines = page_of(metrics.registry).splitlines()
    announced = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {*metrics.config.ts, *metrics.config.model} <= announced
    samples = {line.partition("{")[0] for line in lines if line[0] != "#"}
    assert samples == {"Requests2XX", "Requests4XX", "Requests5XX"}  # 0, so that the first is seen


# -- metrics.yaml ----------------------------------------------------------------------------------

YAML = b"""
ts_metrics:
  gauge:
    - {name: WorkerThreadTime, unit: ms, dimensions: [A, B]}
    - {name: Fans, unit: rpm, dimensions: [Level, Which, Hostname]}
  histogram:
    - {name: QueueTime, unit: Milliseconds, dimensions: [Level, Hostname], buckets: [10, 1000]}
model_metrics: {}
"""


@pytest.fixture
def chosen():
    return Metrics("host", parse_metrics_config(YAML))


def test_what_the_file_leaves_out_is_not_reported(chosen):
    chosen.count_response(200)
    model = ModelMetrics(chosen, "m", "1.0")
    model.versioned.accepted()
    model.versioned.answered(1.0, 2.0, ("id",))
    model.worker_loaded("W-1", 1.0)
    model.batch_done((), 1, 0.25, 0.5, Reply(handler_ms=300.0))
    chosen.report_system("CPUUtilization", 1.0, "Host")
    text = page_of(chosen.registry)
    for name in ("Requests2XX", "ts_inference", "ts_queue", "WorkerLoad", "Prediction", "CPU"):
        assert name not in text


def test_type_labels_and_buckets_are_the_files(chosen):
    ModelMetrics(chosen, "m", "1.0").batch_done((), 1, 0.25, 0.5, Reply(handler_ms=300.0))
    text = page_of(chosen.registry)
    assert 'QueueTime_bucket{Level="Host",Hostname="host",le="1000.0",} 1.0' in text
    assert 'WorkerThreadTime{A="Host",B="host",} 200.0' in text


# -- the host --------------------------------------------------------------------------------------


def test_figures_of_the_host_come_by_name(chosen):
    chosen.report_system("Fans", 900, "Host", "front")
    chosen.report_system("Fans", 800, "Host", "back")
    text = page_of(chosen.registry)
    assert 'Fans{Level="Host",Which="front",Hostname="host",} 900.0' in text
    assert 'Fans{Level="Host",Which="back",Hostname="host",} 800.0' in text


def test_a_figure_with_other_dimensions_is_refused(chosen):
    with pytest.raises(ValueError, match="Level, Which, Hostname"):
        chosen.report_system("Fans", 900, "Host")


def test_the_series_of_the_host_are_bounded(chosen):
    for number in range(1000):
        chosen.report_system("Fans", 1, "Host", str(number))
    with pytest.raises(ValueError, match="1000 series"):
        chosen.report_system("Fans", 1, "Host", "further")


# -- lines that a handler prints -------------------------------------------------------------------


def test_a_printed_line_counts_like_a_reported_metric(metrics):
    model = ModelMetrics(metrics, "m", "1.0")
    for _ in range(2):
        model.printed("[METRICS]Cats.Count:2|#ModelName:m|#type:COUNTER|#hostname:x,1,id")
    assert 'Cats{ModelName="m",Hostname="host",} 4.0' in page_of(metrics.registry)


@pytest.mark.parametrize("line", ["[METRICS]", "[METRICS]Cats.Count:many|#a:b|#hostname:x,1"])
def test_a_printed_line_that_is_none_is_logged(line, metrics, caplog):
    ModelMetrics(metrics, "m", "1.0").printed(line)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.message == f'Failed to parse metrics line: "{line}".'


# -- unregistered models ---------------------------------------------------------------------------


def use(model: ModelMetrics) -> None:
    """Update everything that has the model's name in it."""
    cats = ["counter", "Cats", "Count", 2, [["ModelName", model.name]], []]
    model.versioned.accepted()
    model.unversioned.accepted()
    model.unversioned.answered(1.0, 2.0, ("id",))
    model.batch_done((), 1, 0.25, 0.5, Reply(metrics=[cats], handler_ms=300.0), held=0.1)
    model.failed_batches.update(1)
    model.isolated_batches.update(1)
    model.suspected_requests.update(1)
    model.retried_requests.update(1)
    model.worker_failures.update(1)
    model.worker_loaded(f"W-{model.name}_{model.version}", 1.0)
    model.rejected("queue_full")


def test_the_series_of_an_unregistered_version_leave_the_page(metrics):
    first, second = ModelMetrics(metrics, "m", "1.0"), ModelMetrics(metrics, "m", "2.0")
    use(first)
    use(second)
    first.close()
    text = page_of(metrics.registry)
    assert 'model_version="1.0"' not in text
    assert "W-m_1.0" not in text
    for name in ("PredictionTime", "Cats"):
        assert f'{name}{{ModelName="m"' in text
    assert 'model_version="default"' in text
    assert 'ts_inference_requests_total{model_name="m",model_version="2.0"' in text
    second.close()
    assert '"m"' not in page_of(metrics.registry)


def test_updates_after_the_close_are_ignored(metrics):
    model = ModelMetrics(metrics, "m", "1.0")
    untouched = ModelMetrics(metrics, "n", "1.0")
    use(model)
    for closed in (model, untouched):
        closed.close()
        closed.close()
        use(closed)
        closed.printed("[METRICS]Cats.Count:2|#ModelName:m|#type:COUNTER|#hostname:x,1,id")
    text = page_of(metrics.registry)
    assert '"m"' not in text
    assert '"n"' not in text


def test_a_failed_registration_leaves_the_series_of_the_existing_version(metrics):
    model = ModelMetrics(metrics, "m", "1.0")
    use(model)
    before = page_of(metrics.registry)
    ModelMetrics(metrics, "m", "1.0").close()
    assert page_of(metrics.registry) == before


def test_a_model_that_is_registered_again_counts_from_zero(metrics, value):
    for _ in range(2):
        model = ModelMetrics(metrics, "m", "1.0")
        use(model)
        assert value(metrics, "ts_inference_requests_total", MODEL) == 1
        model.close()
