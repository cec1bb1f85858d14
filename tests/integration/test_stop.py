"""How a server ends: asked to, with work in hand, and by force."""

import contextlib
import os
import signal
import subprocess
import time
import zipfile
from pathlib import Path

import psutil
import pytest
import requests

pytestmark = pytest.mark.integration


@pytest.fixture
def prepared(prepare_server):
    with prepare_server() as server:
        yield server


@pytest.fixture
def own(prepared, handlers):
    """A server of this test alone, with the lab on it."""
    prepared.start()
    prepared.install(handlers / "lab.py", "lab")
    return prepared


def refuses(server):
    try:
        server.connect("inference").close()
    except (ConnectionRefusedError, ConnectionResetError):  # the latter while it closes
        return True
    return False


@pytest.mark.quick
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_idle(own, number):
    with own.connect("inference"), own.connect("management"):  # idle clients hold nobody up
        began = time.monotonic()
        own.stop(number)
        assert time.monotonic() - began < 5


@pytest.mark.quick
def test_accepted_requests_are_answered(own, background, gate, wait_for):
    running = background(own.ask, "lab", id="running", gate=gate.path)
    gate.wait_entered()
    queued = background(own.ask, "lab", id="queued")
    own.wait_queued("lab", 1)
    own.terminate()
    wait_for(lambda: refuses(own))
    gate.open()
    assert running.result().json()["id"] == "running"
    assert queued.result().json()["id"] == "queued"
    own.wait_stopped()


def test_an_archive_that_is_being_unpacked_is_given_up(own, background, wait_for):
    with zipfile.ZipFile(own.store / "large.mar", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(6):
            archive.writestr(f"zeros{number}", bytes(40_000_000))
    models = len(own.unpacked())
    registration = background(own.register, "large.mar")
    wait_for(lambda: len(own.unpacked()) > models)
    began = time.monotonic()
    own.stop()
    assert time.monotonic() - began < 5
    with contextlib.suppress(requests.ConnectionError):
        assert registration.result().status_code == 503


def test_a_kept_connection_gets_no_new_request_through(own, background, gate, wait_for):
    running = background(own.ask, "lab", id="running", gate=gate.path)
    gate.wait_entered()
    with requests.Session() as session:
        url = f"http://127.0.0.1:{own.ports['inference']}"
        assert session.get(f"{url}/ping", timeout=20).status_code == 200
        own.terminate()
        wait_for(lambda: refuses(own))
        try:
            late = session.post(f"{url}/predictions/lab", json={"id": "late"}, timeout=20)
            assert late.status_code == 503
            assert late.json()["message"] == "The server is stopping."
        except requests.ConnectionError:
            pass  # the connection was idle, and is closed
    gate.open()
    assert running.result().status_code == 200
    own.wait_stopped()


def test_a_hung_handler_holds_the_end_up_for_the_deadline_only(
    prepare_server, handlers, background, gate
):
    with prepare_server(drain_timeout="1") as server:
        server.start()
        server.install(handlers / "lab.py", "lab")
        hung = background(server.ask, "lab", gate=gate.path)
        gate.wait_entered()
        queued = background(server.ask, "lab", id=2)
        server.wait_queued("lab", 1)
        began = time.monotonic()
        server.stop()
        assert 1 <= time.monotonic() - began < 6
        assert hung.result().json()["message"] == "Worker died. It was stopped."
        assert queued.result().status_code == 503


def test_a_second_signal_does_no_harm(own, background, gate, wait_for):
    running = background(own.ask, "lab", id=1, gate=gate.path)
    gate.wait_entered()
    own.terminate()
    wait_for(lambda: refuses(own))
    own.terminate()
    gate.open()
    assert running.result().status_code == 200
    own.wait_stopped()


@pytest.mark.parametrize("milliseconds", [1, 5, 20])
def test_signals_repeated_until_the_end_killed_what_cleaned_up(own, milliseconds):
    while own.is_running:
        own.terminate()
        own.terminate(signal.SIGHUP)
        time.sleep(milliseconds / 1000)
    own.wait_stopped()


def test_ctrl_c_held_down_killed_what_cleaned_up(own):
    while own.is_running:
        own.terminate(signal.SIGINT)
        time.sleep(0.005)
    own.wait_stopped()


def test_balancers_notice_before_clients_are_refused(prepare_server, handlers, wait_for):
    with prepare_server(lame_duck_seconds="600") as server:
        server.start()
        server.install(handlers / "lab.py", "lab")
        assert server.inference("GET", "/ready").status_code == 200
        server.terminate()
        wait_for(lambda: server.inference("GET", "/ready").status_code == 503)
        assert server.inference("GET", "/ready").json() == {"status": "Stopping"}
        assert server.inference("GET", "/ping").status_code == 500
        assert server.ask("lab", id="late").json()["id"] == "late"
        began = time.monotonic()
        server.stop()  # a second signal ends the wait
        assert time.monotonic() - began < 5


def test_by_default_nobody_waits_for_balancers(own, background, gate, wait_for):
    running = background(own.ask, "lab", id="running", gate=gate.path)
    gate.wait_entered()
    with requests.Session() as session:
        url = f"http://127.0.0.1:{own.ports['inference']}"
        assert session.get(f"{url}/ready", timeout=20).status_code == 200
        own.terminate()
        wait_for(lambda: refuses(own))
        assert session.get(f"{url}/ready", timeout=20).status_code == 503
    gate.open()
    assert running.result().status_code == 200
    own.wait_stopped()


def test_ctrl_c_again_gives_accepted_requests_up(own, background, gate, wait_for):
    hung = background(own.ask, "lab", gate=gate.path)
    gate.wait_entered()
    own.terminate(signal.SIGINT)
    wait_for(lambda: refuses(own))
    began = time.monotonic()
    own.stop(signal.SIGINT)
    assert time.monotonic() - began < 5  # of ten
    assert hung.result().json()["message"].startswith("Worker died.")


def test_sighup_opens_the_log_files_anew(own, wait_for):
    log = own.directory / "logs" / "access_log.log"
    moved = log.rename(log.with_suffix(".1"))
    own.terminate(signal.SIGHUP)
    own.wait_logged("ts_log.log", "SIGHUP: the log files were opened again.")
    assert own.ask("lab", id=1).status_code == 200
    own.wait_logged("access_log.log", "/predictions/lab")
    assert "/predictions/lab" not in moved.read_text()
    own.stop()


def in_a_terminal(server, *command):
    """Start it in the foreground of a terminal; returns the terminal."""
    terminal, inner = os.openpty()
    with server.console.open("ab") as console:
        server.process = subprocess.Popen(
            [*command, server.program, "--foreground", *server.habits],
            cwd=server.directory,
            env=server.environment,
            stdin=inner,
            stdout=console,
            stderr=subprocess.STDOUT,
        )
    os.close(inner)
    server.wait_ready()
    return terminal


def test_a_closed_terminal_ends_the_server_in_it(prepared):
    terminal = in_a_terminal(prepared, "setsid", "--ctty")
    prepared.terminate(signal.SIGHUP)  # sent by somebody, not by the terminal
    prepared.wait_logged("ts_log.log", "SIGHUP: the log files were opened again.")
    os.close(terminal)
    prepared.wait_stopped()


def test_nohup_outlives_the_terminal(prepared):
    os.close(in_a_terminal(prepared, "setsid", "--ctty", "nohup"))
    assert prepared.inference("GET", "/ping").status_code == 200
    prepared.stop()


def test_in_the_middle_of_a_load(prepared, make_archive, gate):
    source = f"def handle(data, context):\n    open({gate.path!r}).read()\n"
    make_archive(prepared.store, source, "slow")
    prepared.start("--models", "slow.mar")
    gate.wait_entered()
    began = time.monotonic()
    prepared.stop()
    assert time.monotonic() - began < 8


def test_in_the_middle_of_a_registration(own, background, make_archive, gate):
    source = f"def handle(data, context):\n    open({gate.path!r}).read()\n"
    archive = make_archive(own.store, source, "slow")
    registration = background(own.register, archive, initial_workers=1)
    gate.wait_entered()
    own.stop()
    assert registration.result().status_code == 503


def test_while_a_worker_waits_for_its_next_try(own):
    assert own.ask("lab", do="os._exit").status_code == 500
    began = time.monotonic()
    own.stop()
    assert time.monotonic() - began < 5


def test_a_worker_that_ignores_sigterm(own, make_archive):
    source = """
import signal
def handle(data, context):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return data and ["deaf"] * len(data)
"""
    own.install(source, "deaf")
    assert own.predict("deaf").text == "deaf"
    own.stop()


def test_children_of_handlers_end_too(own):
    assert own.ask("lab", do="child").status_code == 200
    own.stop()  # looks for everything that was started


def test_killed(own, wait_for):
    workers = [own.worker("lab")["pid"]]
    assert all(map(psutil.pid_exists, workers))
    own.process.kill()
    own.process.wait()
    wait_for(lambda: not own.processes(), what="workers outlive their server")


def test_killed_in_the_middle_of_a_batch(own, background, gate, wait_for):
    request = background(own.ask, "lab", gate=gate.path)
    gate.wait_entered()
    own.process.kill()
    own.process.wait()
    with pytest.raises(requests.ConnectionError):
        request.result()
    gate.open()
    wait_for(lambda: not own.processes(), what="workers outlive their server")


def test_killed_while_it_starts(prepared, make_archive, wait_for):
    make_archive(prepared.store, "def handle(d, c): return d", "m")
    prepared.start("--models", "all")
    prepared.process.kill()
    prepared.process.wait()
    wait_for(lambda: not prepared.processes(), what="workers outlive their server")


SHARING = """
from multiprocessing.shared_memory import SharedMemory

def handle(data, context):
    return data and [SharedMemory(create=True, size=1000).name for _ in data]
"""


def test_shared_memory_that_a_handler_leaves_outlived_the_server(prepared, wait_for):
    prepared.start()
    prepared.install(SHARING, "m")
    left = Path("/dev/shm") / prepared.predict("m", data=b"x").text.lstrip("/")
    assert left.exists()
    prepared.stop()
    wait_for(lambda: not left.exists())
