"""The server stands still for a while, as in a container that is frozen; its workers go on."""

import time

import psutil
import pytest

pytestmark = pytest.mark.integration


def test_a_worker_that_answers_while_the_server_is_frozen_is_not_taken_for_hung(
    start_server, handlers, background, gate, record
):
    with start_server() as server:
        server.install(handlers / "lab.py", "lab", response_timeout=1)
        pid = server.worker("lab")["pid"]
        answer = background(server.ask, "lab", id=1, gate=gate.path, record=str(record))
        gate.wait_entered()
        process = psutil.Process(server.process.pid)
        process.suspend()
        gate.open()
        time.sleep(1.5)  # longer than the worker may take
        process.resume()
        assert answer.result().json()["id"] == 1
        assert server.worker("lab")["pid"] == pid
        assert record.read_text().split() == ["1"]
