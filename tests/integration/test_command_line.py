"""The commands: start, stop, version; configuration and what is loaded at start."""

import itertools
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from marserve.frontend.telemetry.gpu import count_gpus

pytestmark = pytest.mark.integration

TORCHSERVE = Path(sys.executable).with_name("torchserve")
FINE = "def handle(data, context):\n    return data and ['fine'] * len(data)\n"

PRINTS = """
import sys

def handle(data, context):
    print("a line of the handler")
    print("an error of it", file=sys.stderr)
    return data and ["printed"] * len(data)
"""


def run(server, *arguments, **environment):
    """Run a command in the directory of a server; its status and what it printed.

    A file takes the output: a detached server keeps it open.
    """
    path = server.directory / f"command-{uuid.uuid4().hex}.txt"
    with path.open("wb") as output:
        done = subprocess.run(
            [TORCHSERVE, *arguments],
            cwd=server.directory,
            env=server.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=30,
        )
    return done.returncode, path.read_text()


@pytest.fixture
def prepared(prepare_server):
    """A server of this test alone that nobody has started."""
    with prepare_server() as server:
        yield server


def test_started_and_stopped_by_commands(prepared):
    status, text = run(prepared, "--start", "--ncs")
    assert status == 0
    # It listens when the command returns: no waiting here.
    assert prepared.inference("GET", "/ping").status_code == 200
    assert f"The server listens at http://127.0.0.1:{prepared.ports['inference']}.\n" in text
    pid_file = prepared.temp / ".model_server.pid"
    pid = int(pid_file.read_text())
    assert pid in [process.pid for process in prepared.processes()]

    for arguments in (["--start", "--ncs"], ["--foreground", "--ncs"]):
        status, text = run(prepared, *arguments)
        assert status == 1
        first, which, second = text.splitlines()
        assert first == (
            "TorchServe is already running, please use torchserve --stop to stop TorchServe."
        )
        assert which.startswith(f"It has pid {pid}, directory {prepared.directory}, addresses ")
        assert f" 127.0.0.1:{prepared.ports['inference']}" in which
        assert second.endswith("TMPDIR, directory and addresses: docs/second-server.md.")
    assert prepared.inference("GET", "/ping").status_code == 200

    assert run(prepared, "--stop") == (0, "TorchServe has stopped.\n")
    prepared.assert_nothing_left()
    assert run(prepared, "--stop") == (0, "TorchServe is not currently running.\n")


def test_started_with_standard_output_closed(prepared):
    # The pid file must not become standard output: then nobody could stop the server any more.
    with (prepared.directory / "errors.txt").open("wb") as errors:
        done = subprocess.run(
            ["/bin/sh", "-c", 'exec "$0" --start --ncs >&-', TORCHSERVE],
            cwd=prepared.directory,
            env=prepared.environment,
            stdin=subprocess.DEVNULL,
            stderr=errors,
            timeout=30,
        )
    assert done.returncode == 0
    assert (prepared.temp / ".model_server.pid").read_text().isdigit()
    assert run(prepared, "--stop") == (0, "TorchServe has stopped.\n")
    assert not (prepared.directory / "errors.txt").read_text()
    prepared.assert_nothing_left()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_server_in_the_foreground_serves_with_closed_streams(closed, prepared):
    prepared.process = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$0" --foreground --ncs {closed}', TORCHSERVE],
        cwd=prepared.directory,
        env=prepared.environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    prepared.wait_ready()
    prepared.install(PRINTS, "prints")
    assert prepared.predict("prints", data=b"1").text == "printed"
    prepared.wait_logged("model_log.log", "a line of the handler")
    prepared.terminate()
    assert prepared.process.wait(60) == 0
    prepared.assert_nothing_left()


def test_a_started_server_leaves_the_pipe_of_its_caller(prepared):
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" --start --ncs 2>&1 | tail -1', TORCHSERVE],
        cwd=prepared.directory,
        env=prepared.environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    url = f"http://127.0.0.1:{prepared.ports['inference']}"
    assert done.stdout == f"The server listens at {url}.\n"
    assert prepared.inference("GET", "/ping").status_code == 200


def test_a_program_that_has_started_a_server_reads_its_log_from_a_pipe(prepared):
    with subprocess.Popen(
        [TORCHSERVE, "--start", "--ncs"],
        cwd=prepared.directory,
        env=prepared.environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.wait(30) == 0
        answer = prepared.register("no-such-model.mar")
        assert answer.status_code == 404
        assert run(prepared, "--stop") == (0, "TorchServe has stopped.\n")
        output, _ = started.communicate(timeout=30)
    assert "no-such-model.mar" in output


def test_stop_right_behind_start(prepared):
    assert run(prepared, "--start", "--ncs")[0] == 0
    assert run(prepared, "--stop") == (0, "TorchServe has stopped.\n")
    prepared.assert_nothing_left()


@pytest.mark.parametrize(
    "pid", ["999999999", pytest.param(str(os.getpid()), id="ours"), "nonsense"]
)
def test_a_stale_pid_file(prepared, pid):
    (prepared.temp / ".model_server.pid").write_text(pid)
    assert run(prepared, "--stop") == (0, "TorchServe is not currently running.\n")
    prepared.start()
    prepared.wait_printed("Removing orphan pid file.")
    prepared.stop()


def test_after_a_crash_it_starts_again(prepared):
    prepared.start()
    prepared.process.kill()
    prepared.process.wait()
    prepared.start()
    prepared.terminate()
    assert prepared.process.wait(20) == 0


def test_a_start_is_reported_in_few_lines_and_without_a_warning(prepared):
    prepared.write_property("number_of_netty_threads", "32")
    prepared.write_property("vmargs", "-Xmx1g")
    prepared.start()
    assert prepared.register("gone.mar").status_code == 404
    prepared.stop()
    lines = prepared.console_text().splitlines()
    assert len(lines) <= 17
    assert "Model server started." in lines
    assert not [line for line in lines if "WARN" in line]
    assert "job_queue_size: 100\n" not in prepared.console_text()
    prepared.wait_logged("ts_log.log", "job_queue_size: 100\n")


def test_verbose_shows_on_the_console_what_the_log_file_has(prepared):
    prepared.start("--verbose")
    prepared.stop()
    prepared.wait_printed("job_queue_size: 100\n")


def test_it_says_that_it_has_started_whatever_the_log_levels_are(prepared):
    (prepared.directory / "log4j2.properties").write_text("rootLogger.level = off\n")
    prepared.start("--log-config", "log4j2.properties")
    prepared.terminate()
    assert prepared.process.wait(20) == 0
    assert "Model server started." in prepared.console_text().splitlines()


def test_the_surroundings_are_logged_in_one_record(prepared):
    prepared.start()
    prepared.wait_logged("ts_log.log", "Model server started.")
    lines = prepared.log("ts_log.log").splitlines()
    (first,) = [
        n for n, line in enumerate(lines) if re.search(r"INFO.* marserve .* starts\.$", line)
    ]
    record = list(itertools.takewhile(lambda line: " [" not in line, lines[first + 1 :]))
    facts = dict(line.partition(": ")[::2] for line in record)
    assert facts["Temp directory"].startswith(str(prepared.temp))
    assert facts["Number of CPUs"] == str(len(os.sched_getaffinity(0)))
    assert facts["model_store"] == str(prepared.store)
    assert facts["drain_timeout"] == "10"
    prepared.stop()


def test_version(server):
    status, text = run(server, "--version")
    assert status == 0
    assert re.fullmatch(
        r"marserve \d+\.\d+\.\d+\S* \(TorchServe-compatible\)\nTorchServe Version is 0\.12\.0\n",
        text,
    )


def test_python_runs_it_as_a_module():
    command = [sys.executable, "-m", "marserve", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert re.fullmatch(r"marserve \S+ \(TorchServe-compatible\)\n", done.stdout)


def test_a_missing_model_store(prepared):
    (prepared.directory / "config.properties").write_text("")
    for start in (["--start"], ["--foreground"]):
        assert run(prepared, *start) == (1, "Missing mandatory parameter --model-store\n")
    assert run(prepared, "--model-store", "nowhere") == (
        1,
        f"--model-store directory not found: {prepared.directory / 'nowhere'}\n",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("job_queue_size=many", ["job_queue_size", "many", "a whole number, 1 or more"]),
        ("inference_address=localhost:80", ["inference_address", "http://host[:port]"]),
        ("autoscale_workers=maybe", ["autoscale_workers", "maybe", "true or false"]),
        ("log_format=loud", ["log_format", "loud", "one of text, json"]),
        ("metrics_config=a\\u0000b", ["metrics_config", "a path"]),
        ("default_response_timeout=0", ["default_response_timeout", "a number above 0"]),
    ],
)
def test_a_wrong_value_stops_the_start(prepared, line, words):
    with (prepared.directory / "config.properties").open("a") as config:
        config.write(f"{line}\n")
    status, text = run(prepared, "--start")
    assert status == 1
    assert text.startswith("Invalid configuration: ")
    assert all(word in text for word in words), text
    assert len(text.splitlines()) == 1
    prepared.assert_nothing_left()


def test_an_unknown_key_is_reported(start_server):
    with start_server(no_such_key="1", number_of_netty_threads="4") as server:
        server.wait_printed("no_such_key")
        server.wait_printed("number_of_netty_threads")


def test_a_configuration_that_is_not_there(prepared):
    assert run(prepared, "--ts-config", "no.properties") == (
        1,
        "--ts-config file not found: no.properties\n",
    )


def test_the_environment_names_the_configuration(prepared):
    config = prepared.directory / "config.properties"
    config = config.rename(prepared.directory / "other.properties")
    (prepared.directory / "config.properties").write_text("job_queue_size=wrong\n")
    prepared.environment["TS_CONFIG_FILE"] = str(config)
    prepared.start("--ts-config", "beaten.properties")
    prepared.wait_printed(f"Configuration file: {config}.")
    prepared.stop()


def test_variables_in_the_configuration(prepare_server):
    with prepare_server({"QUEUE_ROOM": "7"}, job_queue_size="$$QUEUE_ROOM$$") as server:
        server.start()
        server.install(FINE, "fine")
        assert server.describe("fine")["jobQueueStatus"]["remainingCapacity"] == 7
        server.stop()
        del server.environment["QUEUE_ROOM"]
        assert run(server, "--foreground") == (1, "Invalid Environment Variable QUEUE_ROOM\n")


def test_the_environment_overrides_the_file_when_allowed(prepare_server):
    environment = {"TS_JOB_QUEUE_SIZE": "9"}
    with prepare_server(environment, job_queue_size="3", enable_envvars_config="true") as server:
        server.start()
        server.install(FINE, "fine")
        assert server.describe("fine")["jobQueueStatus"]["remainingCapacity"] == 9
        server.stop()


def test_a_port_in_use(prepared, server, make_archive):
    make_archive(prepared.store, FINE, "m")
    config = prepared.directory / "config.properties"
    mine, theirs = prepared.ports["metrics"], server.ports["metrics"]
    config.write_text(config.read_text().replace(f":{mine}", f":{theirs}"))
    for start in (["--foreground"], ["--start"]):
        status, text = run(prepared, *start, "--ncs", "--models", "all")
        assert status == 1
        assert f"Cannot listen at http://127.0.0.1:{theirs}: Address already in use" in text
        assert "Model m loaded." not in text  # it is known before models are unpacked
    assert text.splitlines()[-1].startswith("The server did not start: Cannot listen at ")
    prepared.assert_nothing_left()


def test_a_start_gives_the_reason_of_a_broken_library(prepared, tmp_path):
    (tmp_path / "pynvml.py").write_text("raise RuntimeError('the library is broken')\n")
    status, text = run(prepared, "--start", "--ncs", PYTHONPATH=str(tmp_path))
    reason = "The server did not start: RuntimeError: the library is broken"
    assert (status, text.splitlines()[-1]) == (1, reason)
    prepared.assert_nothing_left()


def test_a_start_tells_of_models_that_still_load(prepared, make_archive, gate):
    source = f"def handle(data, context):\n    open({gate.path!r}).read()\n"
    make_archive(prepared.store, source, "slow")
    status, text = run(prepared, "--start", "--ncs", "--models", "slow.mar")
    assert status == 0
    url = f"http://127.0.0.1:{prepared.ports['inference']}"
    line = f"The server listens at {url} and is still loading models (slow); ask {url}/ready."
    assert line in text.splitlines()
    assert prepared.inference("GET", "/ready").status_code == 503
    assert run(prepared, "--stop")[0] == 0


def test_a_start_tells_of_models_that_could_not_be_loaded(prepared):
    status, text = run(prepared, "--start", "--ncs", "--models", "gone.mar")
    assert status == 0
    url = f"http://127.0.0.1:{prepared.ports['inference']}"
    assert text.splitlines()[-1] == (
        f"The server listens at {url}, but models could not be loaded (gone); see its log."
    )
    assert run(prepared, "--stop")[0] == 0


# What is loaded at start


def models(server):
    return [model["modelName"] for model in server.management("GET", "/models").json()["models"]]


@pytest.fixture
def stocked(prepared, make_archive):
    """A server that is not started, with three good archives and two bad ones."""
    make_archive(prepared.store, FINE, "first")
    make_archive(prepared.store, FINE, "second", archive_format="tgz")
    make_archive(prepared.store, FINE, "third", archive_format="no-archive")
    (prepared.store / "broken.mar").write_text("no archive")
    (prepared.store / "notes.txt").write_text("no model")
    return prepared


def test_all_models(stocked):
    (stocked.store / ".hidden").mkdir()
    (stocked.store / ".hidden.mar").write_bytes((stocked.store / "first.mar").read_bytes())
    (stocked.store / "x.model").write_bytes((stocked.store / "second.tar.gz").read_bytes())
    stocked.start("--models", "ALL")
    # The last is the second by its manifest, and comes too late for the name.
    assert models(stocked) == ["broken", "first", "second", "third"]
    stocked.wait_printed("Failed to load model: x.model: Model version 1.0 is already")
    assert ".hidden" not in stocked.console_text()
    stocked.wait_printed("Failed to load model: broken.mar")
    for name in ("first", "second", "third"):
        assert stocked.predict(name).text == "fine"
        described = stocked.describe(name)
        assert described["loadedAtStartup"] is True
        assert described["minWorkers"] == (count_gpus() or len(os.sched_getaffinity(0)))
    stocked.stop()


def test_models_by_name(stocked):
    stocked.start("--models", "mine=first.mar , second.tar.gz", "broken.mar", "gone.mar")
    assert models(stocked) == ["broken", "gone", "mine", "second"]  # and two are not served
    for name in ("broken.mar", "gone.mar"):
        stocked.wait_printed(f"Failed to load model: {name}: ")
    assert stocked.predict("mine").text == "fine"
    stocked.stop()


def test_models_in_the_configuration(prepare_server, make_archive):
    numbers = (
        '{"one": {"1.0": {"minWorkers": 1, "batchSize": 4, "maxBatchDelay": 5, '
        '"runtimeType": "python3"}}}'
    )
    properties = {"load_models": "one=m.mar, two=m.mar", "models": numbers}
    with prepare_server(default_workers_per_model="2", **properties) as server:
        make_archive(server.store, FINE, "m")
        server.start()
        assert models(server) == ["one", "two"]
        one, two = server.describe("one"), server.describe("two")
        assert (one["minWorkers"], one["batchSize"], one["maxBatchDelay"]) == (1, 4, 5)
        assert (two["minWorkers"], two["batchSize"], two["maxBatchDelay"]) == (2, 1, 100)
        assert (one["runtime"], two["runtime"]) == ("python3", "python")
        assert server.predict("two").text == "fine"
        server.stop()


def test_two_versions_in_the_store(prepared, make_archive):
    for number in "12":
        archive = make_archive(prepared.store, FINE.replace("fine", number), "m", version=number)
        archive.rename(prepared.store / f"m-{number}.mar")
    prepared.start("--models", "all")
    assert prepared.predict("m").text == "1"
    assert prepared.predict("m/2").text == "2"
    prepared.stop()


def test_two_versions_in_a_list(prepared, make_archive):
    for number in "12":
        archive = make_archive(prepared.store, FINE.replace("fine", number), "m", version=number)
        archive.rename(prepared.store / f"m-{number}.mar")
    prepared.start("--models", "m=m-2.mar", "m=m-1.mar")
    assert prepared.predict("m").text == "2"  # the first one named is the default
    prepared.stop()


def test_an_empty_store(prepared):
    prepared.start("--models", "all")
    assert models(prepared) == []
    prepared.stop()


def test_withheld_environment_variables(prepare_server, make_archive):
    source = """
import os
def handle(data, context):
    return data and [[os.environ.get("MY_SECRET"), os.environ.get("MY_SETTING")]] * len(data)
"""
    environment = {"MY_SECRET": "x", "MY_SETTING": "y"}
    with prepare_server(environment, blacklist_env_vars=".*SECRET") as server:
        server.start()
        server.install(source, "env")
        assert server.predict("env").json() == [None, "y"]
        server.stop()


def test_spawned_workers(start_server):
    with start_server(worker_start_method="spawn") as server:
        server.install(FINE, "fine")
        assert server.predict("fine").text == "fine"
