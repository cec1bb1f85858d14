"""A stop that reaches every process at once, as systemd's does by default."""

import signal

import pytest

pytestmark = pytest.mark.integration


def test_workers_that_are_told_to_stop_with_the_server_cost_no_accepted_request(
    prepare_server, handlers, background, gate, wait_for
):
    with prepare_server() as server:
        server.start()
        server.install(handlers / "lab.py", "lab")
        running = background(server.ask, "lab", id="running", gate=gate.path)
        gate.wait_entered()
        queued = background(server.ask, "lab", id="queued")
        server.wait_queued("lab", 1)
        pid = server.worker("lab")["pid"]
        for process in server.processes():
            process.send_signal(signal.SIGTERM)
        wait_for(lambda: pid not in {process.pid for process in server.processes()})
        gate.open_for_all()  # the one that stood there stands there again
        assert running.result().json()["id"] == "running"
        assert queued.result().json()["id"] == "queued"
        server.wait_stopped()
