"""The fork server, from which workers come: stopped, killed, hung, and ended."""

import os
import signal
import time

import psutil
import pytest

pytestmark = pytest.mark.integration

LIMITS = ("min_worker", "max_worker")


@pytest.fixture
def own(start_server, handlers):
    """A server of this test alone, with the lab on it."""
    with start_server() as server:
        server.install(handlers / "lab.py", "lab")
        yield server


def fork_servers(server):
    """There is one, or for a moment none."""
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "processes.fork_server" in command_line(child)]


def command_line(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


def fork_server(server):
    (found,) = fork_servers(server)
    return found


def took(call, *arguments, **keywords):
    began = time.monotonic()
    answer = call(*arguments, **keywords)
    return answer, time.monotonic() - began


def scale(server, count):
    return server.management(
        "PUT", "/models/lab", params={"min_worker": count, "synchronous": "true"}
    )


def test_a_stopped_fork_server_delays_a_scaling_for_a_moment(own):
    stopped = fork_server(own)
    stopped.suspend()
    answer, seconds = took(scale, own, 2)
    assert answer.status_code == 200
    assert seconds < 10
    assert not stopped.is_running()
    own.wait_workers("lab", "READY", "READY")
    own.wait_logged("ts_log.log", "The fork server is replaced")
    assert list(own.metrics("marserve_fork_server_replacements_total").values()) == [1]


def test_a_stopped_fork_server_delays_a_registration_for_a_moment(own, handlers):
    fork_server(own).suspend()
    _, seconds = took(own.install, handlers / "lab.py", "other")
    assert seconds < 10
    assert own.ask("other", id=1).status_code == 200


def test_a_worker_that_dies_beside_a_stopped_fork_server_is_replaced(own, wait_for):
    fork_server(own).suspend()
    pid = own.worker("lab")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: own.worker("lab")["pid"] not in (pid, 0, None), 10)
    own.wait_workers("lab", "READY")
    assert own.ask("lab", id=1).status_code == 200


def test_a_stopped_fork_server_does_not_hold_up_the_end(own):
    fork_server(own).suspend()
    _, seconds = took(own.stop)
    assert seconds < 8


def test_a_stopped_fork_server_does_not_hold_up_the_end_in_the_middle_of_a_scaling(own, background):
    fork_server(own).suspend()
    scaling = background(scale, own, 3)
    _, seconds = took(own.stop)
    assert seconds < 8
    scaling.exception()


def test_a_removal_beside_a_stopped_fork_server_ends(own):
    fork_server(own).suspend()
    answer, seconds = took(own.management, "DELETE", "/models/lab")
    assert answer.status_code == 200
    assert seconds < 8


def test_no_request_is_lost_with_the_fork_server(own, together):
    """Workers outlive it: they are asked while it is killed again and again."""
    answers = []

    def ask_on():
        answers.extend(own.ask("lab", id=number).status_code for number in range(50))

    def kill():
        pids = set()
        for _ in range(3):
            for process in fork_servers(own):
                pids.add(process.pid)
                process.kill()
            time.sleep(0.05)
        return pids

    pid = own.worker("lab")["pid"]
    *_, killed = together([ask_on, ask_on, ask_on, kill])
    assert killed
    assert answers == [200] * 150
    assert own.worker("lab")["pid"] == pid
    assert scale(own, 2).status_code == 200
    own.wait_workers("lab", "READY", "READY")


def test_how_a_worker_ended_is_known_though_the_fork_server_was_replaced(own, wait_for):
    assert own.ask("lab", do="os._exit").status_code == 500
    wait_for(lambda: "exit status 3" in own.log("ts_log.log"))


def test_descriptors_leaked_when_the_fork_server_died_during_starts(own, wait_for):
    process = psutil.Process(own.process.pid)

    def put(count):
        answer = own.management("PUT", "/models/lab", params=dict.fromkeys(LIMITS, count))
        assert answer.status_code == 202

    def provoke(times):
        for _ in range(times):
            for each in fork_servers(own):
                each.suspend()
            put(3)  # these starts wait for it, and find it dead
            for each in fork_servers(own):
                each.kill()
            put(1)
        assert scale(own, 2).status_code == 200  # there is a fork server again
        put(1)
        own.wait_workers("lab", "READY")

    provoke(2)
    before = process.num_fds()
    provoke(12)
    wait_for(lambda: process.num_fds() <= before + 2, 10, process.num_fds)


def test_a_preloaded_module_that_ends_its_process_costs_its_preloading_only(
    prepare_server, tmp_path, handlers
):
    (tmp_path / "broken.py").write_text("import os; os._exit(3)")
    environment = {"PYTHONPATH": str(tmp_path)}
    with prepare_server(environment, preload_modules="broken") as server:
        server.start()
        _, seconds = took(server.install, handlers / "lab.py", "lab", startup_timeout=20)
        assert seconds < 10
        assert server.ask("lab", id=1).status_code == 200
        server.wait_logged("ts_log.log", "has not imported its modules (broken)")
        server.stop()


def test_the_end_does_not_wait_for_a_module_that_hangs_while_it_is_preloaded(
    prepare_server, tmp_path
):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)\n")
    environment = {"PYTHONPATH": str(tmp_path)}
    with prepare_server(environment, preload_modules="hanging") as server:
        server.start()
        _, seconds = took(server.stop)
        assert seconds < 5


@pytest.fixture
def prepare_delayed(prepare_server, tmp_path):
    """Prepare a server whose interpreters for one purpose run some code when they start."""

    def prepare(entry, code, **properties):
        is_meant = f'if "processes.{entry}" in " ".join(sys.orig_argv):'
        (tmp_path / "sitecustomize.py").write_text(f"import os, sys\n{is_meant}\n    {code}\n")
        return prepare_server({"PYTHONPATH": str(tmp_path)}, **properties)

    return prepare


STOP = "os.kill(os.getpid(), 19)"


def test_the_end_does_not_wait_for_a_worker_that_is_stopped_before_it_connects(
    prepare_delayed, handlers, make_archive, background, wait_for, tmp_path
):
    stopped = tmp_path / "stopped"
    code = f"open({str(stopped)!r}, 'x').close(); {STOP}"
    with prepare_delayed("bootstrap", code, worker_start_method="spawn") as server:
        server.start()
        archive = make_archive(server.store, handlers / "lab.py", "lab")
        registration = background(server.register, archive, initial_workers=1)
        wait_for(stopped.exists)
        _, seconds = took(server.stop)  # which looks for what is left
        assert seconds < 5
        registration.exception()


def test_the_start_of_a_slow_interpreter_used_up_the_startup_timeout(prepare_delayed, handlers):
    code = "import time; time.sleep(3)"
    with prepare_delayed("bootstrap", code, worker_start_method="spawn") as server:
        server.start()
        _, seconds = took(server.install, handlers / "lab.py", "lab", startup_timeout=1)
        assert seconds > 3
        assert server.ask("lab", id=1).status_code == 200
        server.stop()


def test_a_fork_server_that_is_stopped_before_it_answers_does_not_hold_up_the_end(prepare_delayed):
    with prepare_delayed("fork_server", STOP) as server:
        server.start()
        _, seconds = took(server.stop)
        assert seconds < 5
