"""What runs beside the requests, on a host where it fails."""

import contextlib

import pytest

pytestmark = pytest.mark.integration

# Python runs it before anything else: the library that measures the host fails so many times.
SABOTAGE = """
import psutil
measure, left = psutil.disk_usage, {}
def fail(path):
    global left
    left -= 1
    if left >= 0:
        raise OSError("the disk is gone")
    return measure(path)
psutil.disk_usage = fail
"""


@pytest.fixture
def start(prepare_server, tmp_path):
    """Start a server on whose host so many measurements fail."""

    @contextlib.contextmanager
    def begin(failures):
        (tmp_path / "sitecustomize.py").write_text(SABOTAGE.format(failures))
        environment = {"PYTHONPATH": str(tmp_path)}
        settings = {"disable_system_metrics": "false", "metric_time_interval": "1"}
        with prepare_server(environment, **settings) as server:
            server.start()
            yield server
            server.stop()

    return begin


def test_measurements_that_fail_are_logged_and_go_on(start, wait_for):
    with start(failures=2) as server:
        server.wait_logged("ts_log.log", "left out from now on: OSError: the disk is gone")
        wait_for(lambda: any("DiskUtilization" in name for name in server.metrics()))


def test_measurements_that_fail_do_not_spoil_the_stop(start):
    with start(failures=1000) as server:
        server.wait_logged("ts_log.log", "left out from now on: OSError: the disk is gone")
