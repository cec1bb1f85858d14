"""What starts and ends a container: each way of TorchServe's users, as they are.

The root is read-only, the user is 1000 without capabilities, and there is no network but loopback.
"""

import contextlib
import json
import signal
from typing import Any

import psutil
import pytest
from deploy.container import DOCKER, HOME, Container, instructions
from servers import HANDLERS, PATIENCE, Gate, make_archive, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.containers]

START = "torchserve --start --disable-token-auth"
FOR_EVER = "tail -f /dev/null"
OWN_SCRIPT = """#!/bin/bash
set -e
torchserve "$@" --disable-token-auth
tail -f /dev/null
"""

WAYS: dict[str, tuple[list[str], list[str] | None]] = {
    "serve": (["serve"], None),
    "words with blanks in them": (["torchserve", "--ts-config $TS_CONFIG_FILE", "--dt"], None),
    "a line for the shell": ([f"cd /tmp && {START} && {FOR_EVER}"], None),
    "a script of their own": (["--start"], ["/entry.sh"]),
    "a script of their own, in the foreground": (["--foreground"], ["/entry.sh"]),
    "a line for bash": ([], ["bash", "-ec", f"{START}; {FOR_EVER}"]),
    "no script": ([], START.split()),
}


@pytest.fixture
def prepared(container):
    """One with a model, and the configuration of the image but for what costs time."""
    make_archive(container.store, HANDLERS / "lab.py", "lab").chmod(0o644)
    settings = (DOCKER / "config.properties").read_text()
    settings += "preload_modules=\nload_models=lab.mar\nenable_envvars_config=true\n"
    container.files["/etc/marserve.properties"] = settings
    container.files["/entry.sh"] = OWN_SCRIPT
    return container


def run(container: Container, *command: str, **options: Any) -> None:
    container.run(*command, TS_CONFIG_FILE="/etc/marserve.properties", **options)


@pytest.mark.parametrize("way", WAYS)
def test_accepted_requests_are_answered_before_it_ends(way, prepared, background):
    command, entrypoint = WAYS[way]
    run(prepared, *command, entrypoint=entrypoint)
    prepared.wait_ready()
    gate = Gate(prepared.shared / "gate")
    (prepared.shared / "gate").chmod(0o666)
    order = '{"id": "slow", "gate": "/shared/gate"}'
    running = background(prepared.ask, "POST", "/predictions/lab", order)
    gate.wait_entered()
    prepared.send(signal.SIGTERM)
    wait_for(lambda: prepared.ask("GET", "/ready")[0] == 0, what=prepared.text)
    gate.open()
    status, text = running.result(PATIENCE)
    assert (status, '"id": "slow"' in text) == (200, True)
    assert prepared.wait() == 0
    assert "TorchServe has stopped." in prepared.text()


def test_a_killed_server_ends_it(prepared):
    run(prepared, f"{START}; {FOR_EVER}")
    wait_for(lambda: "The server listens" in prepared.text(), what=prepared.text)
    server = prepared.find("marserve.frontend", "--foreground")
    assert server is not None
    server.kill()
    assert prepared.wait() == 128 + signal.SIGKILL


def test_a_killed_server_in_the_foreground_ends_it(prepared):
    run(prepared, "--foreground", entrypoint=["/entry.sh"])
    prepared.wait_ready()
    server = prepared.find("torchserve", "--foreground")
    assert server is not None
    server.kill()
    assert prepared.wait() == 128 + signal.SIGKILL  # by the script, which stops at an error


def test_the_server_can_be_stopped_from_inside(prepared):
    run(prepared, f"{START}; {FOR_EVER}")
    wait_for(lambda: "The server listens" in prepared.text(), what=prepared.text)
    assert prepared.execute("torchserve", "--stop").stdout == "TorchServe has stopped.\n"
    assert prepared.wait() == 0


def test_a_command_that_stops_the_server_may_start_it_again(prepared):
    run(prepared, f"{START} && torchserve --stop && {START}; echo again; {FOR_EVER}")
    wait_for(lambda: "again" in prepared.text(), what=prepared.text)
    prepared.wait_ready()
    prepared.send()
    assert prepared.wait() == 0
    assert prepared.text().count("TorchServe has stopped.") == 3  # --stop's, and two servers'


def test_a_command_that_fails_behind_the_start_ends_the_server(prepared):
    run(prepared, f"{START} && exit 7")
    assert prepared.wait() == 7
    assert "TorchServe has stopped." in prepared.text()


def test_a_server_that_does_not_start_ends_it(prepared):
    run(prepared, f"{START} --model-store /gone; {FOR_EVER}", "")
    assert prepared.wait() == 1
    assert "--model-store directory not found: /gone" in prepared.text()


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (["echo", "done"], 0),
        (["torch-model-archiver --help"], 0),
        (["kill -9 $$"], 128 + signal.SIGKILL),
        (["no-such-program"], 127),
    ],
)
def test_without_a_server_it_ends_with_its_command(command, status, container):
    container.run(*command)
    assert container.wait() == status, container.text()


def test_options_of_bash_are_kept(container):
    script = 'set +e; false | true; echo "$? $0 $1"; set -e; false; echo on'
    words = ["/bin/bash", "-eo", "pipefail", "-uc", script, "zero", "one two"]
    container.run(entrypoint=words, PATH="/usr/bin")
    assert container.wait() == 1
    assert container.text() == "1 zero one two\n"


def test_an_entrypoint_that_is_not_there(container):
    container.run("x", entrypoint=["marserve-init", "/gone"])
    assert container.wait() == 127
    assert container.text() == "/gone: No such file or directory\n"


def test_orphans_are_reaped(prepared):
    run(prepared, "serve")
    prepared.wait_ready()
    orphan = int(prepared.execute("sh", "-c", "sleep 0.2 >&- 2>&- & echo $!").stdout)
    assert orphan > 1
    wait_for(lambda: prepared.find("sleep 0.2") is None)
    wait_for(lambda: psutil.STATUS_ZOMBIE not in states(prepared), what=lambda: states(prepared))


def states(container: Container) -> list[str]:
    found = []
    for process in container.first.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it was reaped just now
            found.append(process.status())
    return found


def test_any_user_with_the_paths_and_settings_of_the_environment(prepared):
    prepared.user = 1_234_567
    variables = {"LOG_LOCATION": "/shared/logs", "TS_JOB_QUEUE_SIZE": "7"}
    run(prepared, "serve", **variables)
    prepared.wait_ready()
    _, text = prepared.ask("GET", "/models/lab", port=8081)
    assert '"jobQueueSize": 7' in text
    assert (prepared.shared / "logs" / "ts_log.log").stat().st_uid == 1_234_567
    prepared.send()
    assert prepared.wait() == 0


def test_tokens_below_a_read_only_root(prepared):
    run(prepared, "torchserve", "--foreground")
    assert prepared.wait() == 1
    assert "The keys cannot be written: [Errno 30] Read-only file system" in prepared.text()
    prepared.workdir = f"{HOME}/tmp"
    run(prepared, "torchserve", "--foreground")
    prepared.wait_ready()
    assert prepared.ask("GET", "/ping")[0] == 400
    assert '"inference"' in prepared.execute("cat", "key_file.json").stdout


@pytest.mark.parametrize(
    ("writable", "reason"),
    [
        ([], "The pid file needs a directory in which this user may write: No usable temporary"),
        (["/tmp"], f"The logs cannot be written: {HOME}/logs/"),
        (["/tmp", f"{HOME}/logs"], f"Archives cannot be unpacked in {HOME}/tmp: Read-only"),
    ],
)
def test_what_has_to_be_writable(writable, reason, prepared):
    prepared.writable = writable
    run(prepared, "serve", METRICS_LOCATION="/shared")
    assert prepared.wait() == 1
    assert reason in prepared.text()
    assert "Traceback" not in prepared.text()


def test_the_health_check(prepared):
    (check,) = (text for name, text in instructions() if name == "HEALTHCHECK")
    words = json.loads(check.partition("CMD ")[2])
    run(prepared, "serve", TS_INFERENCE_ADDRESS="http://0.0.0.0:9090")
    wait_for(lambda: prepared.ask("GET", "/ready", port=9090)[0] == 200, what=prepared.text)
    done = prepared.execute(*words)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"status": "Ready"})
    prepared.send()
    assert prepared.wait() == 0
