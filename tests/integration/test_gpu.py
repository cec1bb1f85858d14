"""Workers on a real GPU; without one these tests are skipped."""

import os
import signal

import pytest

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

NEVER = 60_000  # ms: a window that no test waits for

HANDLER = """
import os
import torch

class Handler:
    def initialize(self, context):
        self.device = torch.device("cuda", context.system_properties["gpu_id"])
        self.weights = torch.ones(2**28, device=self.device)  # 1 GiB

    def handle(self, data, context):
        bodies = [bytes(row["body"]) for row in data]
        if b"huge" in bodies:
            torch.empty(2**40, dtype=torch.uint8, device=self.device)
        if b"bad" in bodies:
            self.weights[torch.tensor([2**40], device=self.device)].sum().item()
        rows = torch.ones(len(data), 8, device=self.device) * 2
        return [f"{int(row.sum())} {self.device} {os.getpid()}" for row in rows]
"""

# 2 GiB of activations for each row.
LARGE_ROWS = """
import torch

class Handler:
    def initialize(self, context):
        self.device = torch.device("cuda", context.system_properties["gpu_id"])
        torch.zeros(1, device=self.device)

    def sample_input(self):
        return b"1"

    def handle(self, data, context):
        rows = torch.ones(len(data), 2**29, device=self.device)
        return [int(row[0]) for row in rows]
"""


@pytest.fixture(scope="module")
def server(start_server):
    properties = {"disable_system_metrics": "false", "metric_time_interval": "1"}
    with start_server(preload_modules="torch", **properties) as server:
        yield server


def answer_of(answer) -> list[str]:
    assert answer.status_code == 200, answer.text
    return answer.text.split()


def used_memory() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_a_worker_is_on_the_gpu_and_gives_its_memory_back(server, install, wait_for):
    before = used_memory()
    name = install("", HANDLER)
    assert answer_of(server.predict(name, data=b"x"))[:2] == ["16", "cuda:0"]
    worker = server.worker(name)
    assert worker["gpu"] is True
    assert "memory.used" in worker["gpuUsage"]
    assert used_memory() > before + 2**30
    wait_for(lambda: any("GPUMemoryUsed" in series for series in server.metrics()))
    assert server.management("DELETE", f"/models/{name}").status_code == 200
    wait_for(lambda: used_memory() < before + 2**28)


def test_workers_share_the_gpu(server, install, together):
    name = install("", HANDLER, initial_workers=3)
    answers = together([lambda: server.predict(name, data=b"x")] * 30)
    assert {answer_of(answer)[1] for answer in answers} == {"cuda:0"}


def test_a_model_can_stay_on_the_cpu(server, install):
    name = install("deviceType: cpu\n", "def handle(d, c): return d and ['fine'] * len(d)\n")
    assert server.predict(name, data=b"x").text == "fine"
    assert server.worker(name)["gpu"] is False


def test_a_request_without_room_on_the_gpu_fails_alone(server, install, together):
    name = install("", HANDLER, batch_size=4, max_batch_delay=NEVER)
    bodies = [b"a", b"huge", b"c", b"d"]
    answers = together([lambda body=body: server.predict(name, data=body) for body in bodies])
    assert [answer.status_code for answer in answers] == [200, 507, 200, 200]
    assert len({answer.text.split()[2] for answer in answers if answer.ok}) == 1


def test_a_worker_whose_gpu_context_is_lost_is_replaced(server, install):
    name = install("", HANDLER)
    before = answer_of(server.predict(name, data=b"a"))[2]
    failed = server.predict(name, data=b"bad")
    assert failed.status_code == 503
    assert failed.json()["message"].startswith("Prediction failed: the worker's GPU")
    assert answer_of(server.predict(name, data=b"b"))[2] != before


def test_a_killed_worker_is_replaced_and_its_memory_is_free(server, install, wait_for):
    name = install("", HANDLER)
    held = used_memory()
    pid = answer_of(server.predict(name, data=b"a"))[2]
    os.kill(int(pid), signal.SIGKILL)
    assert answer_of(server.predict(name, data=b"b"))[2] != pid
    wait_for(lambda: abs(used_memory() - held) < 2**28)


def test_the_automatic_batch_size_fits_into_the_memory_of_the_gpu(server, install):
    name = install("batchSize: auto\nbatchPolicy: adaptive\n", LARGE_ROWS)
    _, total = torch.cuda.mem_get_info()
    assert 1 <= server.describe(name)["batchSize"] <= total // 2**31
    assert server.predict(name, data=b"x").text == "1"
