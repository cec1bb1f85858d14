"""The wall clock of the host is set while the server runs: nobody waits longer or shorter."""

import time

import pytest

pytestmark = pytest.mark.integration

DAY = 86_400

# Python runs it before anything else, in workers too: the clock is as wrong as a file says.
CLOCK = """
import time
from pathlib import Path
right, wrong_by = time.time, Path({!r})
time.time = lambda: right() + float(wrong_by.read_text())
"""


@pytest.fixture
def set_clock(tmp_path):
    """Let the clock of the server be wrong by so many seconds from now on."""

    def wrong_by(seconds):
        (tmp_path / "next").write_text(str(seconds))
        (tmp_path / "next").replace(tmp_path / "wrong-by")

    wrong_by(0)
    (tmp_path / "sitecustomize.py").write_text(CLOCK.format(str(tmp_path / "wrong-by")))
    return wrong_by


@pytest.fixture
def own(prepare_server, set_clock, tmp_path):
    """A server of this test alone, on a host with this clock."""
    with prepare_server({"PYTHONPATH": str(tmp_path)}) as server:
        server.start()
        yield server
        server.stop()


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_clock_that_jumps_ends_no_request_and_no_worker(
    own, handlers, background, gate, set_clock, jump
):
    config = "responseTimeout: 30\nclientTimeoutInMills: 30000\n"
    own.install(handlers / "lab.py", "lab", config)
    pid = own.worker("lab")["pid"]
    running = background(own.ask, "lab", id="running", gate=gate.path)
    gate.wait_entered()
    queued = background(own.ask, "lab", id="queued")
    own.wait_queued("lab", 1)
    set_clock(jump)
    gate.open()
    assert running.result().json()["id"] == "running"
    assert queued.result().json()["id"] == "queued"
    assert own.worker("lab")["pid"] == pid


@pytest.mark.parametrize("jump", [DAY, -DAY])
def test_a_worker_that_hangs_while_the_clock_jumps_is_killed_in_time(
    own, handlers, background, gate, set_clock, jump
):
    own.install(handlers / "lab.py", "lab", response_timeout=2)
    began = time.monotonic()
    hung = background(own.ask, "lab", gate=gate.path)
    gate.wait_entered()
    set_clock(jump)
    assert hung.result().json()["message"].startswith("Worker died. Timeout: ")
    assert 2 <= time.monotonic() - began < 8
    assert own.ask("lab", id="next").json()["id"] == "next"
