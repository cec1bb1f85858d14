"""Errors of a GPU after which a process can serve no more, though it lives; told by their text."""

import pytest

pytestmark = pytest.mark.integration

NEVER = 60_000  # ms: a window that no test waits for

# As a GPU does it: once it has happened, everything in the process fails in the same way.
HANDLER = """
import os

broken = False

def handle(data, context):
    global broken
    bodies = [bytes(row["body"]) for row in data or ()]
    broken = broken or b"bad" in bodies
    if broken:
        raise RuntimeError("CUDA error: device-side assert triggered")
    return [f"{body.decode()} {os.getpid()}" for body in bodies]
"""

SAMPLED = """
class Handler:
    broken = False

    def initialize(self, context):
        pass

    def sample_input(self):
        return b"sample"

    def handle(self, data, context):
        self.broken = self.broken or context.get_request_id(0).startswith("sample")
        if self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return [bytes(row["body"]) for row in data]
"""


def pid_of(answer):
    assert answer.status_code == 200, answer.text
    return int(answer.text.split()[1])


@pytest.mark.parametrize("config", ["", "outstandingBatches: 3\n"])
def test_a_sticky_cuda_error_does_not_leave_a_worker_that_answers_507_for_ever(
    server, install, config
):
    name = install(config, HANDLER)
    before = pid_of(server.predict(name, data=b"a"))
    failed = server.predict(name, data=b"bad")
    assert failed.status_code == 503
    assert failed.json()["message"].startswith("Prediction failed: the worker's GPU")
    assert pid_of(server.predict(name, data=b"b")) != before
    server.wait_workers(name, "READY")
    poisoned = "Backend worker is poisoned: RuntimeError: CUDA error: device-side assert triggered"
    server.wait_logged("ts_log.log", poisoned)
    assert len(server.management("GET", f"/models/{name}").json()[0]["workers"]) == 1


def test_the_mates_of_a_request_that_poisons_its_worker_are_answered_by_the_next(
    server, install, together
):
    name = install("", HANDLER, batch_size=4, max_batch_delay=NEVER)
    bodies = [b"a", b"bad", b"c", b"d"]
    answers = together([lambda body=body: server.predict(name, data=body) for body in bodies])
    assert [answer.status_code for answer in answers] == [200, 503, 200, 200]
    batches = server.management("GET", f"/models/{name}/batches").json()["batches"]
    assert "out_of_memory" not in {batch["reason"] for batch in batches}


def test_a_coroutine_that_poisons_its_worker_is_replaced_too(server, install):
    name = install("asyncCommunication: true\n", HANDLER.replace("def handle", "async def handle"))
    before = pid_of(server.predict(name, data=b"a"))
    assert server.predict(name, data=b"bad").status_code == 503
    assert pid_of(server.predict(name, data=b"b")) != before


def test_a_model_whose_sample_poisons_its_worker_is_loaded_without_profiling(server, install):
    name = install(
        "batchPolicy: adaptive\nbatchSize: 4\n",
        SAMPLED,
    )
    assert server.predict(name, data=b"a").text == "a"
