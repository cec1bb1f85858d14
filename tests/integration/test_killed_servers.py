"""What a server and its workers leave behind, however they end: no process and no file."""

import os
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.integration

SECONDS = 5.0

#: What the first request of a worker has it do; "entered" says that it is at it.
HANDLER = """
import ctypes, os, subprocess, sys, time
from pathlib import Path

def handle(data, context):
    if data is None:
        return None
    task, entered = bytes(data[0]["body"]).decode().split()
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    if task == "child":
        subprocess.Popen(sleep)
    if task == "session":
        subprocess.Popen(sleep, start_new_session=True)
    if task == "daemon":  # its parent is gone before the worker is
        code = f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"
        subprocess.run([sys.executable, "-c", code])
    if task == "environment":
        subprocess.Popen([*sleep, os.environ["MARSERVE_TEST"]], env={}, start_new_session=True)
    Path(entered).touch()
    if task == "idle":
        return ["done"]
    if task == "C":
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter's lock
    time.sleep(1000)
"""


@pytest.fixture
def prepared(prepare_server):
    with prepare_server(number_of_gpu="0") as server:  # with GPUs, a rank would need one for itself
        yield server


def occupy(server, background, wait_for, tmp_path, name, task):
    """Have a worker do something that it does not come back from."""
    entered = tmp_path / f"{name}-{task}"
    background(server.predict, name, data=f"{task} {entered}")
    wait_for(entered.exists)


def kill(server):
    server.process.kill()
    server.process.wait()


def remains(server):
    mark = server.mark.encode()
    return [
        process
        for process in psutil.process_iter()
        if mark in read(process, "environ") + read(process, "cmdline")
    ]


def read(process, name):
    try:
        return Path(f"/proc/{process.pid}/{name}").read_bytes()
    except OSError:
        return b""


def assert_nothing_left(server, wait_for):
    wait_for(lambda: not remains(server), SECONDS, lambda: remains(server))
    # The pid file stays: its lock is free, and the next server takes it.
    wait_for(lambda: not list(server.temp.glob("marserve-*")), SECONDS)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_busy_workers_and_what_their_handlers_had_started(
    method, prepare_server, background, wait_for, tmp_path
):
    with prepare_server(worker_start_method=method) as server:
        server.start()
        tasks = ("sleep", "C", "child", "session", "daemon", "environment")
        for number, task in enumerate(tasks):
            server.install(HANDLER, f"m{number}")
            occupy(server, background, wait_for, tmp_path, f"m{number}", task)
        assert len(remains(server)) >= 1 + len(tasks) + 3
        kill(server)
        assert_nothing_left(server, wait_for)


def test_daemons_of_an_idle_worker(prepared, background, wait_for, tmp_path):
    prepared.start()
    prepared.install(HANDLER.replace('if task == "idle"', "if True"), "m")
    for task in ("daemon", "session"):
        occupy(prepared, background, wait_for, tmp_path, "m", task)
    kill(prepared)
    assert_nothing_left(prepared, wait_for)


def test_the_ranks_of_torchrun(prepared, background, wait_for, tmp_path):
    config = "parallelType: tp\ntorchrun: {nproc-per-node: 2}\nstartupTimeout: 60\n"
    prepared.start()
    prepared.install(HANDLER, "m", config)
    occupy(prepared, background, wait_for, tmp_path, "m", "C")
    kill(prepared)
    assert_nothing_left(prepared, wait_for)


def test_pip_in_the_middle_of_an_installation(
    prepare_server, make_archive, background, wait_for, tmp_path
):
    started = tmp_path / "started"
    source = tmp_path / "endless"
    source.mkdir()
    (source / "setup.py").write_text(
        f"import pathlib, time\npathlib.Path({str(started)!r}).touch()\ntime.sleep(1000)\n"
    )
    (tmp_path / "requirements.txt").write_text(f"{source}\n")
    environment = {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    properties = {"install_py_dep_per_model": "true", "dependency_cache": str(tmp_path / "cache")}
    with prepare_server(environment, **properties) as server:
        server.start()
        archive = make_archive(
            server.store,
            HANDLER,
            "m",
            requirements_file=str(tmp_path / "requirements.txt"),
        )
        background(server.register, archive)
        wait_for(started.exists)
        kill(server)
        assert_nothing_left(server, wait_for)


def test_what_the_guard_could_not_do_the_next_server_does(
    prepared, background, wait_for, tmp_path, start_server
):
    prepared.start()
    prepared.install(HANDLER, "m")
    occupy(prepared, background, wait_for, tmp_path, "m", "daemon")
    (guard,) = guards(prepared)
    for process in (prepared.process, guard):  # as by kill -9 of the whole group
        process.send_signal(signal.SIGSTOP)
    guard.kill()
    kill(prepared)
    time.sleep(0.1)
    assert len(remains(prepared)) >= 2
    assert prepared.unpacked()
    prepared.start()
    wait_for(lambda: len(list(prepared.temp.glob("marserve-*"))) == 1, SECONDS)
    prepared.wait_logged("ts_log.log", "its server is dead")
    assert [p for p in remains(prepared) if "time.sleep(1000)" in " ".join(p.cmdline())] == []
    prepared.stop()


def test_half_a_download_goes_with_a_later_one(
    prepare_server, make_archive, background, wait_for, tmp_path
):
    archive = make_archive(tmp_path, HANDLER, "m")
    with (
        socket.create_server(("127.0.0.1", 0)) as peer,
        prepare_server(allowed_urls="http://127.0.0.1:.*,file://.*") as server,
    ):
        server.start()
        background(server.register, f"http://127.0.0.1:{peer.getsockname()[1]}/half.mar")
        client, _ = peer.accept()
        with client:
            assert client.recv(65536)
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nP")
            (half,) = wait_for(lambda: list(server.store.glob(".*.part")))
            kill(server)
        server.start()
        recent = server.store / f".{uuid.uuid4().hex}.part"
        recent.touch()
        long_ago = time.time() - 7200
        os.utime(half, (long_ago, long_ago))
        assert server.register(f"file://{archive}").status_code == 200
        assert list(server.store.glob(".*.part")) == [recent]
        recent.unlink()
        server.stop()


def guards(server):
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if b"workdir.py" in read(child, "cmdline")]


def test_a_guard_that_was_killed_is_replaced(prepared, wait_for):
    prepared.start()
    (guard,) = guards(prepared)
    guard.kill()
    wait_for(lambda: [each for each in guards(prepared) if each != guard])
    prepared.stop()


def test_the_leftovers_of_others_stay(prepared, wait_for):
    with prepared.directory.joinpath("victim").open("w") as victim:
        victim.write("not ours")
    strangers = [prepared.temp / f"marserve-{name}" for name in ("unmarked", "file", "link")]
    strangers[0].mkdir()
    strangers[1].touch()
    strangers[2].symlink_to(prepared.directory)
    dead = prepared.temp / "marserve-dead"
    dead.mkdir()
    (dead / ".owner-holds-a-lock").write_text(os.uname().nodename)
    (dead / "link").symlink_to(prepared.directory)
    elsewhere = prepared.temp / "marserve-elsewhere"  # its lock may be held where we cannot see it
    elsewhere.mkdir()
    (elsewhere / ".owner-holds-a-lock").write_text("another-machine\n00000000-another-boot")
    prepared.start()
    wait_for(lambda: not dead.exists(), SECONDS)
    assert all(os.path.lexists(path) for path in strangers)
    shutil.rmtree(elsewhere)
    assert prepared.directory.joinpath("victim").read_text() == "not ours"
    strangers[0].rmdir()
    for path in strangers[1:]:
        path.unlink()
    prepared.stop()


def test_servers_that_start_together_leave_each_others_directories(prepare_server, wait_for):
    with prepare_server() as first, prepare_server() as second:
        second.environment["TEMP"] = first.environment["TEMP"]
        for server in (first, second):
            server.launch()
        for server in (first, second):
            server.wait_ready()
        assert len(list(first.temp.glob("marserve-*"))) == 2
        for server in (first, second):
            server.terminate()
        for server in (first, second):
            assert server.process.wait(20) == 0
        assert list(first.temp.glob("marserve-*")) == []


#: Each function starts a process that no signal to the worker's group reaches, and returns its id.
CHILDREN = """
import multiprocessing, os, subprocess, time

def handle(data, context):
    return data and [str(int(globals()[bytes(data[0]["body"]).decode()]()))]

def session():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

def shell():
    return subprocess.check_output("setsid sleep 1000 > /dev/null 2>&1 & echo $!", shell=True)

def fork():
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        if (pid := os.fork()) == 0:
            time.sleep(1000)
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return os.read(reader, 20)

def sleep():
    os.setsid()
    time.sleep(1000)

def multiprocess():
    process = multiprocessing.get_context("fork").Process(target=sleep, daemon=True)
    process.start()
    return process.pid

def environment():
    return subprocess.Popen(["/bin/sleep", "1000"], env={}, start_new_session=True).pid

def leave():
    os._exit(3)
"""
KINDS = ("session", "shell", "fork", "multiprocess", "environment")


def start_children(server, model, kinds=KINDS):
    answers = [server.predict(model, data=kind) for kind in kinds]
    return [psutil.Process(int(answer.text)) for answer in answers]


def living(processes):
    return [each for each in processes if each.is_running() and each.status() != "zombie"]


def unregister(server, model):
    assert server.management("DELETE", f"/models/{model}").status_code == 200


def scale_down(server, model):
    limits = {"min_worker": 0, "max_worker": 0, "synchronous": "true"}
    assert server.management("PUT", f"/models/{model}", params=limits).status_code == 200


def kill_worker(server, model):
    os.kill(server.worker(model)["pid"], signal.SIGKILL)


def leave_by_itself(server, model):
    server.predict(model, data="leave")


def stop(server, _model):
    server.stop()


@pytest.mark.parametrize("end", [unregister, scale_down, kill_worker, leave_by_itself, stop])
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_whatever_ends_a_worker_ends_what_its_handler_had_started(
    method, end, prepare_server, wait_for
):
    with prepare_server(worker_start_method=method) as server:
        server.start()
        for name in ("m", "other"):
            server.install(CHILDREN, name)
        # Without its parent one that has another environment is found by nobody.
        dies = end in (kill_worker, leave_by_itself)
        children = start_children(server, "m", KINDS[:-1] if dies else KINDS)
        others = start_children(server, "other")
        end(server, "m")
        wait_for(lambda: not living(children), SECONDS, lambda: living(children))
        if end is stop:
            assert not living(others)
        else:
            assert living(others) == others
            assert zombies(server) == []
            server.stop()


def zombies(server):
    processes = psutil.Process(server.process.pid).children(recursive=True)
    return [each for each in processes if each.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("end", [unregister, kill_worker, stop])
@pytest.mark.parametrize("runner", ["torchrun", "the CPU launcher"])
def test_whatever_ends_a_worker_of_several_processes_ends_what_they_had_started(
    runner, end, prepare_server, wait_for
):
    config = "startupTimeout: 60\n"
    if runner == "torchrun":
        config += "parallelType: tp\ntorchrun: {nproc-per-node: 2}\n"
    launcher = str(runner != "torchrun").lower()
    with prepare_server(cpu_launcher_enable=launcher, number_of_gpu="0") as server:
        server.start()
        server.install(CHILDREN, "m", config)
        children = start_children(server, "m", KINDS[:-1] if end is kill_worker else KINDS)
        end(server, "m")
        wait_for(lambda: not living(children), SECONDS, lambda: living(children))
        if end is not stop:
            server.stop()
