"""ts.launcher: a program that starts a server, feeds it and stops it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

FINE = "def handle(data, context):\n    return data and ['fine'] * len(data)\n"
PROGRAM = """
import sys
from ts import launcher

def tell(*words):  # in one piece: the server's lines come in between
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

launcher.start({arguments})
tell("started")
answer = launcher.register_model("two", "two.mar")
tell(answer.status_code, answer.json()["status"])
tell(launcher.register_model_with_params({{"url": "gone.mar"}}).status_code)
tell(launcher.register_model_with_params({{"url": "two.mar", "model_name": "three"}}).status_code)
input()
launcher.stop({stop})
tell("stopped")
"""


@pytest.fixture
def prepared(prepare_server, make_archive):
    with prepare_server(default_workers_per_model="1") as server:
        for name in ("one", "two"):
            make_archive(server.store, FINE, name)
        yield server


def run_program(server, program):
    """A running Python program in the directory of a server."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=server.directory,
        env=server.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "stop"),
    [
        ("models='one.mar', snapshot_file='config.properties'", ""),
        ("model_store='model_store', models=['one.mar'], no_config_snapshots=True, "
         "disable_token=True, enable_model_api=True, plugin_folder='x'", "wait=60"),
    ],
)  # fmt: skip
def test_started_fed_and_stopped(prepared, arguments, stop):
    with run_program(prepared, PROGRAM.format(arguments=arguments, stop=stop)) as program:
        lines = iter(program.stdout.readline, "")
        next(line for line in lines if line == "started\n")
        assert prepared.inference("GET", "/ping").ok
        assert prepared.is_known("one")
        # The server prints to the same place, in between.
        calls = [
            line for line in lines_until(lines, "200\n") if line[0].isdigit() and "[" not in line
        ]
        assert calls == [
            '200 Model "two" Version: 1.0 registered with 1 initial workers\n',
            "404\n",
            "200\n",
        ]
        assert prepared.predict("two").text == "fine"
        output, _ = program.communicate("\n", timeout=30)
    assert program.returncode == 0
    assert output.endswith("stopped\n")
    prepared.assert_nothing_left()


def test_start_gives_the_lines_of_the_console_and_the_server_outlives_the_program(prepared):
    program = """
import queue
from ts import launcher
first = launcher.start(models="one.mar", snapshot_file="config.properties")
second = launcher.start(models="two.mar", snapshot_file="config.properties")
lines = list(iter(first.get_nowait, None))
print("ended", any("started" in line for line in lines), isinstance(second, queue.Queue))
"""
    with run_program(prepared, program) as started:
        output, _ = started.communicate(timeout=60)
    assert started.returncode == 0
    assert "ended True True\n" in output
    # Nobody reads what the server prints now.
    for _ in range(3):
        assert prepared.predict("two").text == "fine"
    assert not prepared.is_known("one")
    assert prepared.register("one.mar").status_code == 200
    assert prepared.predict("one").text == "fine"
    with run_program(prepared, "from ts import launcher\nlauncher.stop()") as stopped:
        stopped.communicate(timeout=60)
    assert stopped.returncode == 0
    prepared.assert_nothing_left()


def lines_until(lines, last):
    for line in lines:
        yield line
        if line == last:
            return


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("model_store='nowhere'", "--model-store directory not found: "),
        ("snapshot_file='https.properties'", "the launcher supports plain http only"),
        ("snapshot_file='taken.properties'", "The server did not start"),
    ],
)
def test_a_server_that_does_not_start(prepared, server, arguments, words):
    own = (prepared.directory / "config.properties").read_text()
    (prepared.directory / "https.properties").write_text("inference_address=https://127.0.0.1\n")
    mine, theirs = prepared.ports["management"], server.ports["management"]
    (prepared.directory / "taken.properties").write_text(own.replace(f":{mine}", f":{theirs}"))
    with run_program(prepared, f"from ts import launcher\nlauncher.start({arguments})") as program:
        output, _ = program.communicate(timeout=30)
    assert program.returncode == 1
    assert words in output
    assert "LauncherError" in output
    prepared.assert_nothing_left()
