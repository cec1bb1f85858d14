"""What operators see of a failure: its line in a log, its counter on the page of metrics."""

import psutil
import pytest

pytestmark = pytest.mark.integration


def counted(server, metric, name):
    """The samples of a metric about a model, by reason where it has any."""
    samples = server.metrics(metric)
    about = {series: value for series, value in samples.items() if f'"{name}"' in series}
    return {series.partition('reason="')[2].partition('"')[0]: n for series, n in about.items()}


def test_refused_requests_are_counted_by_the_reason(server, install, background, gate):
    name = install("jobQueueSize: 1\n")
    running = background(server.ask, name, gate=gate.path)
    gate.wait_entered()
    late = background(server.predict, name, json={}, headers={"X-Timeout-Ms": "300"})
    server.wait_queued(name, 1)
    assert server.ask(name).status_code == 503
    assert late.result().status_code == 504
    gate.open()
    assert running.result().status_code == 200
    assert server.management("PUT", f"/models/{name}?min_worker=0&synchronous=true").ok
    assert server.ask(name).status_code == 503
    assert counted(server, "marserve_rejected_requests_total", name) == {
        "queue_full": 1,
        "expired": 1,
        "no_worker": 1,
    }


def test_a_worker_that_dies_idle_is_logged_and_counted(server, install, wait_for):
    name = install()
    psutil.Process(server.worker(name)["pid"]).kill()
    wait_for(lambda: counted(server, "marserve_worker_failures_total", name) == {"": 1})
    worker = f"W-{server.worker(name)['id']}-{name}_1.0"
    server.wait_logged("ts_log.log", f"{worker} Worker disconnected. WORKER_MODEL_LOADED")
    server.wait_logged("ts_log.log", f"{worker}: Worker disconnected. Its process was killed by")
    assert server.ask(name, id=1).json()["id"] == 1
    assert counted(server, "marserve_retried_requests_total", name) == {"": 0}


def test_what_is_no_http_is_in_the_access_log(server):
    assert server.exchange("inference", b"\x16\x03\x01 garbage\r\n\r\n").startswith(b"HTTP/1.1 400")
    server.wait_logged("access_log.log", '"GET /bad-request HTTP/1.1" 400')
