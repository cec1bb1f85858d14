"""Real processes: what only the operating system can show."""

import asyncio
import dataclasses
import errno
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fakes
import psutil
import pytest

from marserve.backend.protocol import Load, Loaded, Predict
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.launchers import fork_server
from marserve.frontend.workers.launchers.local import LocalLauncher
from marserve.frontend.workers.launchers.local_process import LocalProcess, WorkerSpec

pytestmark = pytest.mark.integration

SECONDS = 20.0

# Each request names what the handler is to do.
HANDLER = """
import atexit, ctypes, os, signal, subprocess, sys, time
from concurrent.futures import ThreadPoolExecutor

executor = ThreadPoolExecutor(1)

def handle(data, context):
    if data is None:
        print("loading")
        return
    task = bytes(data[0]["body"]).decode()
    if task == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "exit":
        sys.exit(7)
    if task == "_exit":
        print("good bye", flush=True)
        os._exit(3)
    if task == "null":
        ctypes.string_at(0)
    if task == "forked null":
        if os.fork() == 0:
            ctypes.string_at(0)
        os.wait()
        os._exit(4)
    if task == "hang":
        open("hangs", "w").close()
        time.sleep(600)
    if task == "lines":
        print("one", flush=True)
        os.write(1, b"two\\r\\nthr")
        os.write(1, b"ee\\n\\xff\\n")
        os.write(2, b"warned")
    if task == "executor":
        atexit.register(print, "good bye")
        return executor.submit(list, ["done"]).result()
    if task == "child":
        return [str(subprocess.Popen(["sleep", "600"]).pid)]
    if task == "renamed":  # as setproctitle does it: over the environment
        fields = open("/proc/self/stat").read().rpartition(")")[2].split()
        ctypes.memset(int(fields[47]), 0, int(fields[48]) - int(fields[47]))
        engine = ["/bin/sleep", "600"]
        return [str(subprocess.Popen(engine, env={}, start_new_session=True).pid)]
    if task == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if task == "where":
        return [[os.getcwd(), os.environ.get("MINE"), sorted(os.environ)[:3], sys.path[0]]]
    return [task]
"""


class Machine:
    """One worker process with its connection."""

    def __init__(self, process: LocalProcess, connection: WorkerConnection) -> None:
        self.process, self.connection = process, connection

    async def do(self, task: str) -> bytes:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        batch = Predict([fakes.make_input(task.encode())])
        self.connection.predict(batch, SECONDS, reply.set_result)
        return bytes((await asyncio.wait_for(reply, SECONDS)).predictions[0].body)

    def ask(self, task: str) -> None:
        """Give it a task from which no answer will come."""
        batch = Predict([fakes.make_input(task.encode())])
        self.connection.predict(batch, SECONDS, lambda _: None)


@pytest.fixture(params=["spawn", "forkserver", "command"])
def way(request):
    """How a process begins."""
    return str(request.param)


@pytest.fixture
def launcher(way):
    return LocalLauncher("spawn" if way == "command" else way, ())


@pytest.fixture
def spec(way, tmp_path):
    (tmp_path / "process_test_handler.py").write_text(HANDLER)
    return WorkerSpec(
        name="W-9000-m_1.0",
        environment={"PATH": os.environ["PATH"], "MINE": "x", "PYTHONPATH": ":".join(sys.path)},
        python_path=(str(tmp_path),),
        model_dir=str(tmp_path),
        threads=1,
        python=sys.executable if way == "command" else "",
    )


@pytest.fixture
def work(launcher, spec, tmp_path):
    """Run a scenario with a worker that has loaded its model; nothing may be left behind."""
    load = Load("m", str(tmp_path), "process_test_handler", 1, None, True, 1000, "1")

    async def scene(scenario):
        process = await launcher.start(spec)
        connection = await WorkerConnection.from_socket(process.sock, max_response_bytes=1000)
        try:
            reply = await connection.load(load, SECONDS, SECONDS)
            assert isinstance(reply, Loaded), reply
            await scenario(Machine(process, connection))
        finally:
            connection.close()
            await process.stop(SECONDS)
            await launcher.close()
            await asyncio.sleep(0)

    def run(scenario, *, opens=0):
        before = open_descriptors()
        asyncio.run(asyncio.wait_for(scene(scenario), 3 * SECONDS))
        assert open_descriptors() <= before + opens

    return run


def open_descriptors() -> int:
    return psutil.Process().num_fds()


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_worker_runs_in_its_directory_with_its_environment_alone(work, tmp_path):
    async def scenario(machine):
        seen = (await machine.do("where")).decode()
        assert str(tmp_path) in seen
        assert '"x"' in seen
        assert "HOME" not in seen
        assert psutil.Process(machine.process.pid).is_running()
        assert os.getpgid(machine.process.pid) == machine.process.pid != os.getpgid(0)

    work(scenario)


def test_a_worker_leaves_by_itself_when_its_wire_is_closed(work):
    async def scenario(machine):
        assert not machine.process.has_exited
        machine.connection.close()
        assert await machine.process.stop(SECONDS) == 0
        assert machine.process.has_exited

    work(scenario)


def test_an_executor_of_a_handler_held_up_the_end_of_its_worker(work, caplog):
    """Its threads end when the interpreter asks them to, as libraries write what they hold."""
    caplog.set_level(logging.INFO, logger="MODEL_LOG")

    async def scenario(machine):
        assert await machine.do("executor") == b"done"
        machine.connection.close()
        assert await machine.process.stop(SECONDS) == 0

    work(scenario)
    assert "good bye" in "\n".join(caplog.messages).split("\n")


def test_its_lines_come_to_the_model_log_by_stream(work, caplog):
    caplog.set_level(logging.INFO, logger="MODEL_LOG")

    async def scenario(machine):
        await machine.do("lines")
        machine.connection.close()
        await machine.process.stop(SECONDS)

    work(scenario)
    found = [
        (r.worker, r.levelname, line)
        for r in caplog.records
        if r.name == "MODEL_LOG"
        for line in r.getMessage().split("\n")
    ]
    said = [text for worker, _, text in found if worker == "W-9000-m_1.0-stdout"]
    start = said.index("one")
    assert said[start : start + 4] == ["one", "two", "three", "\\xff"]
    assert "loading" in said
    assert "Torch worker started." in said
    assert ("W-9000-m_1.0-stderr", "WARNING", "warned") in found


@pytest.mark.parametrize(("task", "status"), [("kill", -signal.SIGKILL), ("exit", 7)])
def test_a_sudden_end_is_seen_with_its_status(task, status, work):
    async def scenario(machine):
        called = []
        machine.process.on_exit(lambda: called.append(1))
        machine.ask(task)
        await asyncio.wait_for(machine.connection.lost, SECONDS)
        assert await machine.process.stop(SECONDS) == status
        await asyncio.sleep(0)
        assert called == [1]
        assert await machine.process.stop(0) == status

    work(scenario)


@pytest.mark.parametrize(
    ("task", "end", "stack", "output"),
    [
        ("kill", "Its process was killed by SIGKILL.", "", "Torch worker started."),
        ("exit", "Its process ended with exit status 7.", "", "in handle"),
        ("_exit", "Its process ended with exit status 3.", "", "good bye"),
        ("null", "Its process was killed by SIGSEGV.", "in handle", "loading"),
        ("forked null", "Its process ended with exit status 4.", "", "Segmentation fault"),
    ],
)
def test_a_worker_that_dies_leaves_how_and_where(task, end, stack, output, work):
    async def scenario(machine):
        machine.ask(task)
        await asyncio.wait_for(machine.connection.lost, SECONDS)
        assert await machine.process.exit_within(SECONDS) == end
        await machine.process.stop(0)
        diagnostics = machine.process.diagnostics
        assert stack in "\n".join(diagnostics.stack)
        assert bool(stack) == bool(diagnostics.stack)
        assert output in "\n".join(diagnostics.output)

    work(scenario)


def test_a_worker_that_hangs_writes_down_where(work, tmp_path, wait_for):
    async def scenario(machine):
        machine.ask("hang")
        await asyncio.to_thread(wait_for, (tmp_path / "hangs").exists)
        await machine.process.write_stacks()
        assert not machine.process.has_exited
        await machine.process.stop(0)
        assert await machine.process.exit_within(0) == ""
        assert "in handle" in "\n".join(machine.process.diagnostics.stack)

    work(scenario)


def test_the_children_of_a_worker_go_with_it(work):
    children = []

    async def scenario(machine):
        child = int(await machine.do("child"))
        assert not gone(child)
        children.append(os.pidfd_open(child))

    work(scenario, opens=1)
    ended, _, _ = select.select(children, [], [], SECONDS)
    os.close(children[0])
    assert ended == children


def test_what_a_worker_with_another_title_has_started_goes_with_it(work):
    async def scenario(machine):
        engine = int(await machine.do("renamed"))
        assert not gone(engine)
        await machine.process.stop(SECONDS, machine.connection.close)
        assert gone(engine)

    work(scenario)


@pytest.mark.parametrize("way", ["forkserver"], indirect=True)
def test_an_end_is_seen_though_no_thread_can_ask_for_its_status(work, monkeypatch):
    def fail(_):
        raise RuntimeError("can't start new thread")

    async def scenario(machine):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fail)
            machine.ask("kill")
            end = await machine.process.exit_within(SECONDS)
            assert end == "Its process ended with an unknown exit status."

    work(scenario)


def test_a_search_that_fails_is_logged_and_holds_up_no_end(work, monkeypatch, caplog):
    def fail():
        raise OSError(errno.EMFILE, "Too many open files")

    async def scenario(machine):
        with monkeypatch.context() as patch:
            patch.setattr(psutil, "pids", fail)
            assert await machine.process.stop(SECONDS, machine.connection.close) == 0

    work(scenario)
    failure = "The search for processes that a worker has started failed: [Errno 24] Too many open"
    assert [each for each in caplog.messages if each.startswith(failure)]


def test_a_worker_that_does_not_listen_is_killed(work):
    async def scenario(machine):
        machine.ask("deaf")
        machine.connection.close()
        assert await machine.process.stop(0.01) in (-signal.SIGKILL, -signal.SIGTERM)
        assert gone(machine.process.pid)

    work(scenario)


def test_a_cancelled_stop_kills_the_worker_and_closes_what_is_open(work):
    async def scenario(machine):
        before = open_descriptors()
        machine.ask("deaf")
        stopping = asyncio.ensure_future(machine.process.stop(SECONDS))
        await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
        assert stopping.cancelled()
        # The ends of two pipes, a file in memory and a pidfd; others go with the process itself.
        assert open_descriptors() <= before - 4
        assert "loading" in machine.process.diagnostics.output
        await asyncio.wait_for(machine.connection.lost, SECONDS)
        exited = asyncio.Event()
        machine.process.on_exit(exited.set)
        await asyncio.wait_for(exited.wait(), SECONDS)

    work(scenario)


def test_a_stranger_that_gets_the_number_of_a_dead_worker_is_left_alone(work):
    async def scenario(machine):
        machine.ask("exit")
        exited = asyncio.Event()
        machine.process.on_exit(exited.set)
        await asyncio.wait_for(exited.wait(), SECONDS)
        stranger = await asyncio.to_thread(process_with_number, machine.process.pid)
        if stranger is None:
            pytest.skip("this needs the right to choose the number of the next process")
        try:
            await machine.process.stop(0)
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(0.1)
        finally:
            stranger.kill()
            stranger.wait()

    work(scenario)


def process_with_number(pid: int) -> "subprocess.Popen[bytes] | None":
    """Start a process that leads a group of this number; None where that cannot be had."""
    for _ in range(20):
        try:
            Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        except OSError:
            return None
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        if process.pid == pid:
            return process
        process.kill()
        process.wait()
    return None


def test_a_start_nobody_waits_for_any_more_leaves_no_process(launcher, spec):
    async def scenario():
        try:
            for turns in (1, 5, 20):
                starting = asyncio.ensure_future(launcher.start(spec))
                for _ in range(turns):
                    await asyncio.sleep(0)
                starting.cancel()
                try:
                    process = await starting
                except asyncio.CancelledError:
                    continue
                await process.stop(0)  # it was quicker
                process.sock.close()
            process = await launcher.start(spec)
            process.sock.close()
            await process.stop(SECONDS)
        finally:
            await launcher.close()

    children = {child.pid for child in psutil.Process().children(recursive=True)}
    before = open_descriptors()
    asyncio.run(scenario())
    left = [c for c in psutil.Process().children(recursive=True) if c.pid not in children]
    _, left = psutil.wait_procs(left, timeout=SECONDS)
    assert left == []
    assert open_descriptors() <= before


def test_an_environment_may_be_larger_than_what_a_socket_holds(launcher, spec):
    async def scenario():
        # One variable of a command line may have 128 KB.
        large = {f"LARGE_{number}": "x" * 100_000 for number in range(8)}
        environment = {**spec.environment, **large}
        try:
            process = await launcher.start(dataclasses.replace(spec, environment=environment))
            process.sock.close()
            assert await process.stop(SECONDS) == 0
        finally:
            await launcher.close()

    asyncio.run(scenario())


def test_no_worker_could_be_started_once_the_fork_server_had_died_as_it_became_ready(
    spec, wait_for
):
    async def scenario():
        launcher = LocalLauncher("forkserver")
        before = set(psutil.Process().children())
        try:
            launcher.warm_up()
            while not (begun := set(psutil.Process().children()) - before):  # noqa: ASYNC110 - a process sets no event
                await asyncio.sleep(0)
            # That it is ready and that it has ended is seen in one turn.
            (one,) = begun
            time.sleep(0.5)  # noqa: ASYNC251
            one.kill()
            wait_for(lambda: gone(one.pid))
            process = await launcher.start(dataclasses.replace(spec, python=""))
            process.sock.close()
            assert await process.stop(SECONDS) == 0
        finally:
            await launcher.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["forkserver"], indirect=True)
def test_a_preloaded_module_that_hangs_costs_its_preloading_only(
    spec, tmp_path, monkeypatch, caplog
):
    (tmp_path / "hanging.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def scenario():
        launcher = LocalLauncher("forkserver", ["hanging"], 3.0)
        try:
            process = await launcher.start(spec)
            process.sock.close()
            assert await process.stop(SECONDS) == 0
        finally:
            await launcher.close()

    asyncio.run(scenario())
    assert "has not imported its modules (hanging)" in caplog.text


def test_the_late_answer_of_a_fork_server_is_not_that_of_the_next_request(monkeypatch):
    late = """
import socket, sys, time
sock = socket.socket(fileno=int(sys.argv[1]))
while request := sock.recv(64):
    time.sleep(0.2)
    sock.send(b'{"status": %s}' % request)
"""
    command = [sys.executable, "-c", late]
    monkeypatch.setattr(fork_server, "command", lambda _python, sock, _: [*command, str(sock)])
    process = fork_server._Process((), None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(subprocess.Popen, "kill", lambda _: None)  # it dies a moment later
            with pytest.raises(fork_server.ForkServerLost, match="it did not answer"):
                process.request(b"1", (), 0.1)
            time.sleep(0.3)
            with pytest.raises(fork_server.ForkServerLost, match="it did not answer"):
                process.request(b"2")
    finally:
        process.discard()


@pytest.mark.parametrize("way", ["forkserver"], indirect=True)
def test_a_fork_server_was_killed_where_many_workers_start_at_once(spec, tmp_path, monkeypatch):
    """It was to have forked all of them within the time that is meant for one."""
    slow = "import os, time\nos.register_at_fork(before=lambda: time.sleep(0.15))\n"
    (tmp_path / "slow_forks.py").write_text(slow)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(fork_server, "_ANSWER_SECONDS", 1.0)
    lost = []

    async def scenario():
        launcher = LocalLauncher("forkserver", ["slow_forks"], SECONDS, lambda: lost.append(1))
        try:
            processes = await asyncio.gather(*(launcher.start(spec) for _ in range(10)))
            for process in processes:
                process.sock.close()
            await asyncio.gather(*(process.stop(SECONDS) for process in processes))
        finally:
            await launcher.close()

    asyncio.run(scenario())
    assert not lost
