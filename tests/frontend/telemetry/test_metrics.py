import pytest

from marserve.backend.protocol import Reply
from marserve.frontend.telemetry.exposition import render
from marserve.frontend.telemetry.metrics import Metrics

HOST = {"Level": "Host", "Hostname": "host"}
MODEL = {"model_name": "m", "model_version": "1.0", "hostname": "host"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("host")


def value(metrics: Metrics, name: str, labels: dict[str, str]) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


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
def test_answers_are_counted_by_the_class_of_their_status(
    status: int, name: str, metrics: Metrics
) -> None:
    metrics.count_response(status)
    counted = {
        each: value(metrics, f"{each}_total", HOST)
        for each in ("Requests2XX", "Requests4XX", "Requests5XX")
    }
    assert counted == {each: float(each == name) for each in counted}


def test_requests_are_counted_under_the_version_their_url_names(metrics: Metrics) -> None:
    model = metrics.for_model("m", "1.0")
    model.versioned.accepted()
    model.unversioned.accepted()
    model.unversioned.answered(0.5, 2.0)
    default = {**MODEL, "model_version": "default"}
    assert value(metrics, "ts_inference_requests_total", MODEL) == 1
    assert value(metrics, "ts_inference_requests_total", default) == 1
    assert value(metrics, "ts_queue_latency_microseconds_total", default) == 500_000
    assert value(metrics, "ts_inference_latency_microseconds_total", default) == 2_000_000


def test_a_batch_is_counted_with_its_size_and_its_times(metrics: Metrics) -> None:
    cats = ["counter", "Cats", "Count", 2, [["ModelName", "m"]], []]
    reply = Reply(metrics=[cats], handler_ms=300.0)
    metrics.for_model("m", "1.0").batch_done(3, 0.25, 0.5, reply)
    assert value(metrics, "marserve_batch_size_sum", MODEL) == 3
    assert value(metrics, "marserve_batch_seconds_sum", MODEL) == 0.5
    assert value(metrics, "QueueTime", HOST) == 250
    assert value(metrics, "WorkerThreadTime", HOST) == 200
    handler = {"ModelName": "m", "Level": "Model", "Hostname": HOST["Hostname"]}
    assert value(metrics, "PredictionTime", handler) == 300
    assert 'Cats{ModelName="m"' in render(metrics.registry)


def test_failures_rejections_and_loads_are_counted(metrics: Metrics) -> None:
    model = metrics.for_model("m", "1.0")
    model.batch_failed()
    model.worker_failed()
    model.rejected("queue_full")
    model.worker_loaded("W-1", 1.5)
    assert value(metrics, "marserve_failed_batches_total", MODEL) == 1
    assert value(metrics, "marserve_worker_failures_total", MODEL) == 1
    reason = {**MODEL, "reason": "queue_full"}
    assert value(metrics, "marserve_rejected_requests_total", reason) == 1
    assert value(metrics, "WorkerLoadTime", {"WorkerName": "W-1", **HOST}) == 1500
    for _ in range(2):
        model.worker_gone("W-1")
    assert "W-1" not in render(metrics.registry)


def test_a_model_registered_again_goes_on_counting(metrics: Metrics) -> None:
    for _ in range(2):
        metrics.for_model("m", "1.0").versioned.accepted()
    assert value(metrics, "ts_inference_requests_total", MODEL) == 2


def test_a_watched_gauge_is_looked_up_when_it_is_asked_for(metrics: Metrics) -> None:
    lengths = [3.0]
    metrics.watch("queued", "Jobs", ["model"], lambda: [(["m"], lengths[0])])
    assert 'queued{model="m"} 3.0' in render(metrics.registry)
    lengths[0] = 4.0
    assert 'queued{model="m"} 4.0' in render(metrics.registry)


def test_the_servers_own_metrics_are_told_from_a_handlers(metrics: Metrics) -> None:
    metrics.host_gauge("CPUUtilization", "Percent").set(7)
    assert metrics.is_own("CPUUtilization")
    assert metrics.is_own("ts_inference_requests_total")
    assert not metrics.is_own("PredictionTime")


def test_names_are_torchserves_without_the_suffix_and_without_birthdays(metrics: Metrics) -> None:
    metrics.count_response(200)
    text = render(metrics.registry)
    assert 'Requests2XX{Level="Host",Hostname="host"} 1.0' in text
    assert "_created" not in text
