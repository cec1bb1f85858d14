"""A machine whose NVIDIA driver hangs; the driver is a stand-in."""

import os
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

STAND_INS = Path(__file__).with_name("stand_ins") / "nvidia"
PLAIN = "def handle(data, context):\n    return data and ['fine'] * len(data)\n"


@pytest.fixture
def hanging(tmp_path):
    """While it is there, the driver hangs."""
    return tmp_path / "hangs"


@pytest.fixture
def server(prepare_server, hanging):
    path = os.pathsep.join([str(STAND_INS), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "DRIVER_HANGS": str(hanging)}
    # The host is measured each second, which must not start a thread each time.
    measured = {"disable_system_metrics": "false", "metric_time_interval": "1"}
    with prepare_server(environment, **measured) as server:
        server.start()
        server.install(PLAIN, "m", initial_workers=4)
        yield server


def usages(server):
    return [worker["gpuUsage"] for worker in server.describe("m")["workers"]]


def test_a_hung_driver_held_each_description_up_once_per_worker(
    server, hanging, together, wait_for
):
    assert usages(server)[3] == (
        "gpuId::3 utilization.gpu::3 % utilization.memory::3 % memory.used::1 MiB"
    )
    hanging.touch()
    time.sleep(1.1)  # what is known of the GPUs is good for a second
    began = time.monotonic()
    together([lambda: usages(server)] * 10)
    assert time.monotonic() - began < 6
    threads = psutil.Process(server.process.pid).num_threads()
    began = time.monotonic()
    for _ in range(50):
        assert usages(server) == ["failed to obtained gpu usage"] * 4
        assert server.inference("GET", "/ping").status_code == 200
    assert time.monotonic() - began < 3
    assert server.predict("m").text == "fine"
    assert psutil.Process(server.process.pid).num_threads() <= threads
    began = time.monotonic()
    server.stop()
    assert time.monotonic() - began < 5
