"""Temporary files of a server that something else removes, such as a cleaner of /tmp."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ECHO = "def handle(d, c):\n    return d and ['in'] * len(d)\n"


def workdir(server):
    (found,) = server.temp.glob("marserve-*")
    return found


def clean(folder, keep=()):
    """Remove the files below a folder, as a cleaner does that ignores locks."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.name not in keep:
            path.unlink()


def kill_worker(server, name):
    os.kill(server.describe(name)["workers"][0]["pid"], signal.SIGKILL)


def last_error(server, name):
    return server.describe(name)["workers"][0].get("lastError") or ""


def serves_again(server, name):
    answer = server.predict(name, data=b"x")
    return answer.ok and answer.text == "in"


def run(server, *words):
    program = Path(sys.executable).with_name(words[0])
    return subprocess.run(
        [program, *words[1:]],
        cwd=server.directory,
        env=server.environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("keep", [(), ("MANIFEST.json",)])
def test_a_worker_that_ends_is_replaced_from_the_archive(
    start_server, make_archive, wait_for, keep
):
    with start_server() as server:
        make_archive(server.store, ECHO, "m")
        assert server.register("m.mar", initial_workers=1).ok
        clean(workdir(server) / "models", keep)
        kill_worker(server, "m")
        wait_for(lambda: serves_again(server, "m"))
        assert server.management("PUT", "/models/m?min_worker=2&synchronous=true").ok
        server.wait_logged("ts_log.log", "it was unpacked again from")


def test_a_worker_whose_archive_is_gone_too_says_so_and_recovers_with_it(
    start_server, make_archive, wait_for
):
    with start_server() as server:
        archive = make_archive(server.store, ECHO, "m")
        assert server.register("m.mar", initial_workers=1).ok
        kept = archive.rename(server.directory / "kept.mar")
        clean(workdir(server) / "models")
        kill_worker(server, "m")
        wait_for(lambda: str(archive) in last_error(server, "m"))
        reason = last_error(server, "m")
        assert str(workdir(server)) in reason
        assert "is gone" in reason
        assert "No such file or directory" in reason
        kept.rename(archive)
        wait_for(lambda: serves_again(server, "m"))


def test_files_are_not_mixed_with_those_of_another_archive(start_server, make_archive, wait_for):
    with start_server() as server:
        make_archive(server.store, ECHO, "m")
        assert server.register("m.mar", initial_workers=1).ok
        (server.store / "m.mar").unlink()
        make_archive(server.store, f"{ECHO}# another\n", "m")
        clean(workdir(server) / "models")
        kill_worker(server, "m")
        wait_for(lambda: "not the file that was registered" in last_error(server, "m"))


def test_a_function_of_a_workflow_is_unpacked_again(start_server, make_workflow, wait_for):
    with start_server() as server:
        handler = "def f(data, context):\n    return data and ['in'] * len(data)\n"
        make_workflow(server.store, "wf", "models: {}\ndag: {f: []}\n", handler)
        answer = server.management("POST", "/workflows?url=wf.war")
        assert answer.ok, answer.text
        clean(workdir(server))
        kill_worker(server, "wf__f")
        wait_for(lambda: server.inference("POST", "/wfpredict/wf", data=b"x").text == "in")


def test_a_model_directory_that_is_gone_is_named(start_server, tmp_path, wait_for):
    with start_server() as server:
        folder = server.store / "folder"
        (folder / "MAR-INF").mkdir(parents=True)
        (folder / "handler.py").write_text(ECHO)
        (folder / "MAR-INF" / "MANIFEST.json").write_text(
            '{"model": {"modelName": "m", "modelVersion": "1.0", "handler": "handler.py"}}'
        )
        assert server.register("folder", initial_workers=1).ok
        moved = folder.rename(tmp_path / "moved")
        kill_worker(server, "m")
        wait_for(lambda: "directory cannot be entered" in last_error(server, "m"))
        assert str(workdir(server)) in last_error(server, "m")
        moved.rename(folder)
        wait_for(lambda: serves_again(server, "m"))


def test_a_server_whose_pid_file_was_removed_is_found(prepare_server, wait_for):
    with prepare_server() as server:
        server.start()
        file = server.temp / ".model_server.pid"
        file.unlink()
        refused = run(server, "torchserve", "--start", "--ncs")
        assert (refused.returncode, "already running" in refused.stdout) == (1, True), refused
        wait_for(file.exists)  # within seconds
        wait_for(lambda: file.read_text() == str(server.process.pid))
        file.unlink()
        assert run(server, "marserve", "ready").returncode == 0
        file.unlink(missing_ok=True)
        stopped = run(server, "torchserve", "--stop")
        assert (stopped.returncode, stopped.stdout) == (0, "TorchServe has stopped.\n")
        server.wait_stopped()


def test_a_working_directory_that_was_removed_is_made_again(
    prepare_server, make_archive, wait_for, tmp_path
):
    with prepare_server() as server:
        server.start()
        make_archive(server.store, ECHO, "m")
        assert server.register("m.mar", initial_workers=1).ok
        directory = workdir(server)
        shutil.rmtree(directory)
        kill_worker(server, "m")
        wait_for(lambda: serves_again(server, "m"))
        wait_for((directory / ".owner-holds-a-lock").exists)
        assert directory.stat().st_mode & 0o777 == 0o700
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not directory.exists(), what="the guard has not removed it")


def test_a_socket_file_that_was_removed_is_named(prepare_server, tmp_path):
    path = tmp_path / "metrics.sock"
    with prepare_server(metrics_address=f"unix:{path}") as server:
        server.ports.pop("metrics")
        server.start()
        server.wait_logged("ts_log.log", "Model server started.")
        path.unlink()
        server.wait_logged("ts_log.log", f"The socket file {path} is gone")
        server.stop()
