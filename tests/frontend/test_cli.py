import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from marserve.frontend.cli import build_parser, main
from marserve.frontend.lifecycle.pidfile import PidFile

SERVER = """
import signal, sys, threading
from pathlib import Path
from marserve.frontend.lifecycle.pidfile import PidFile
ended = threading.Event()
signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
pid_file = PidFile(Path(sys.argv[1]))
pid_file.claim()
print("claimed", flush=True)
ended.wait(30)
pid_file.release()
"""


@pytest.fixture(autouse=True)
def pid_path(tmp_path, monkeypatch):
    (tmp_path / "store").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TS_CONFIG_FILE", raising=False)
    return tmp_path / ".model_server.pid"


@pytest.fixture
def running(pid_path):
    command = [sys.executable, "-c", SERVER, str(pid_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


@pytest.fixture
def served(monkeypatch):
    """Puts a server in place that notes its configuration and returns at once."""
    configs = []

    def serve(config, report, **_):
        assert PidFile().read() is not None
        configs.append(config)
        return 0

    replace_server(monkeypatch, serve)
    return configs


def replace_server(monkeypatch: pytest.MonkeyPatch, serve: Callable[..., int]) -> None:
    server = ModuleType("marserve.frontend.server")
    server.__dict__["serve"] = serve
    monkeypatch.setitem(sys.modules, server.__name__, server)


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_version(flag, capsys):
    ours = f"marserve {metadata.version('marserve')} (TorchServe-compatible)\n"
    assert main([flag]) == 0
    assert capsys.readouterr().out == ours
    assert main([flag], "torchserve") == 0
    assert capsys.readouterr().out == f"{ours}TorchServe Version is 0.12.0\n"


def test_our_bare_name_shows_the_usage_and_starts_nothing(served, pid_path, capsys):
    Path("config.properties").write_text("model_store=store\n")
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: marserve ")
    assert served == []
    assert not pid_path.exists()


def test_the_bare_drop_in_name_starts_as_torchserve_does(capsys):
    assert main([], "torchserve") == 1
    assert capsys.readouterr().out == "Missing mandatory parameter --model-store\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--start"], "Missing mandatory parameter --model-store"),
        (["--model-store", "/gone"], "--model-store directory not found: /gone"),
        (["--ts-config", "gone"], "--ts-config file not found: gone"),
        (["--log-config", "gone"], "--log-config file not found: gone"),
        (["--cpp-log-config", "gone"], "--cpp-log-config file not found: gone"),
        (["--workflow-store", "gone"], "--workflow-store directory not found: gone"),
        (
            ["--foreground", "--pid-descriptor", "99", "--model-store", "store"],
            "Descriptor 99 is not the pid file",
        ),
    ],
)
def test_a_mistake_is_reported_in_a_sentence_and_exit_1(arguments, sentence, served, capsys):
    assert main(arguments) == 1
    assert capsys.readouterr().out.startswith(sentence)
    assert served == []


@pytest.mark.parametrize(
    "arguments", [["--start", "--stop"], ["--version", "--stop"], ["--start", "-v"], ["--what"]]
)
def test_flags_that_do_not_go_together_exit_2(arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("docter .", "there is no command 'docter'; did you mean doctor?"),
        (
            "up",
            "there is no command 'up'; choose from serve, pack, bench, doctor, run, ready, demo",
        ),
        ("--foreground doctor", "doctor must be the first argument"),
    ],
)
def test_a_wrong_command_is_told_the_right_ones(arguments, sentence, served, capsys):
    with pytest.raises(SystemExit) as left:
        main([*arguments.split(), "--model-store", "store"])
    assert left.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert sentence in error
    assert "{serve,pack,bench,doctor,run,ready,demo}" in error
    assert served == []


def test_help_does_not_show_the_inner_flag():
    assert "--pid-descriptor" not in build_parser().format_help()


def test_flags_become_configuration(served):
    flags = "--foreground --ncs --dt --enable-model-api --models a.mar n=b.mar --model-store store"
    assert main(flags.split()) == 0
    (config,) = served
    assert config.model_store == Path("store").absolute()
    assert config.load_models == ("a.mar", "n=b.mar")
    assert config.model_api
    assert not config.token_authorization


def test_without_ncs_snapshots_are_kept_and_the_newest_is_read(served):
    snapshots = Path("logs/config")
    snapshots.mkdir(parents=True)
    text = 'model_store=store\njob_queue_size=7\nmodel_snapshot={"modelCount": 0}\n'
    (snapshots / "20260101000000000-shutdown.cfg").write_text(text)
    assert main(["--foreground"]) == 0
    assert main(["--foreground", "--ncs", "--model-store", "store"]) == 0
    assert [config.job_queue_size for config in served] == [7, 100]
    assert [config.snapshots_kept for config in served] == [100, 0]


def test_absent_flags_leave_the_file_in_charge(served):
    Path("ts.properties").write_text(
        "model_store=store\nload_models=all\ninference_address=http://0.0.0.0:80"
    )
    assert main(["--foreground", "--ts-config", "ts.properties"]) == 0
    (config,) = served
    assert config.load_models == ("all",)
    assert config.token_authorization
    assert not config.model_api


def test_flags_without_an_effect_are_noted(served):
    assert main(["--foreground", "--model-store", "store", "--ppath", "x.jar"]) == 0
    (config,) = served
    assert any(note.startswith("plugins_path (command line) ") for note in config.warnings)


def test_workflows_have_a_store_of_their_own_or_that_of_the_models(served):
    Path("wars").mkdir()
    assert main(["--foreground", "--model-store", "store", "--workflow-store", "wars"]) == 0
    assert main(["--foreground", "--model-store", "store"]) == 0
    assert [each.workflows_directory.name for each in served] == ["wars", "store"]


def test_the_foreground_server_holds_the_pid_file_and_its_exit_code_counts(pid_path, monkeypatch):
    during = []

    def serve(config, report, **_):
        during.append(pid_path.exists())
        return 3

    replace_server(monkeypatch, serve)
    assert main(["--foreground", "--model-store", "store"]) == 3
    assert during == [True]
    assert not pid_path.exists()


def test_a_server_that_falls_over_leaves_no_pid_file(pid_path, monkeypatch):
    def serve(config, report, **_):
        raise RuntimeError("fell over")

    replace_server(monkeypatch, serve)
    with pytest.raises(RuntimeError, match="fell over"):
        main(["--foreground", "--model-store", "store"])
    assert not pid_path.exists()


def test_an_orphan_pid_file_is_reported_and_replaced(pid_path, served, capsys):
    pid_path.write_text("1")
    assert main(["--foreground", "--model-store", "store"]) == 0
    assert capsys.readouterr().out == "Removing orphan pid file.\n"
    assert len(served) == 1


def test_an_orphan_pid_file_is_replaced_though_it_cannot_be_reported(pid_path, served, monkeypatch):
    """A server whose output went to a full disk did not start after a crash."""
    pid_path.write_text("1")
    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["--foreground", "--model-store", "store"]) == 0
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()
    assert len(served) == 1


@pytest.mark.parametrize("mode", [[], ["--start"], ["--foreground"]])
def test_a_second_server_is_refused(mode, running, served, capsys):
    assert main([*mode, "--model-store", "store"]) == 1
    assert capsys.readouterr().out == (
        "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
        f"It has pid {running.pid}, directory {Path.cwd()}.\n"
        "A second server needs another TMPDIR, directory and addresses: docs/second-server.md.\n"
    )
    assert served == []
    assert running.poll() is None


def test_stop_without_a_server(capsys):
    assert main(["--stop"]) == 0
    assert capsys.readouterr().out == "TorchServe is not currently running.\n"


def test_stop_returns_when_the_server_is_gone(pid_path, running, capsys):
    assert main(["--stop"]) == 0
    assert capsys.readouterr().out == "TorchServe has stopped.\n"
    assert running.poll() == 0  # not -SIGTERM: it was asked, and ended in order
    assert not pid_path.exists()


def test_stop_leaves_a_stranger_with_an_old_pid_alone(pid_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        pid_path.write_text(str(stranger.pid))
        assert main(["--stop"]) == 0
        stranger.send_signal(signal.SIGKILL)
    assert stranger.returncode == -signal.SIGKILL


def test_stop_ends_torchserves_own_server(pid_path, capsys):
    command = [sys.executable, "-c", "input()", "org.pytorch.serve.ModelServer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as java:
        pid_path.write_text(str(java.pid))
        assert main(["--stop"]) == 0
        assert java.wait(10) == -signal.SIGTERM
    assert capsys.readouterr().out == "TorchServe has stopped.\n"
    assert not pid_path.exists()


def test_pack_hands_its_arguments_to_the_archiver(monkeypatch):
    received = []
    archiver = ModuleType("marserve.tools.archiver.archiver")
    archiver.__dict__["main"] = received.append
    monkeypatch.setitem(sys.modules, archiver.__name__, archiver)
    assert main(["pack", "--model-name", "m", "--stop"]) == 0
    assert received == [["--model-name", "m", "--stop"]]


def test_importing_the_command_line_loads_no_server():
    program = (
        "import sys, marserve.frontend.cli; "
        "print([name for name in ('aiohttp', 'torch', 'asyncio') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Replaces the server in other processes: Python runs sitecustomize.py at each start.
STAND_IN = """
import signal, sys, types
def serve(config, report, **options):
    if config.load_models == ("dies",):
        return 7
    if config.load_models == ("fails",):
        report.failed("no port")
        return 1
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("Model server started.", flush=True)
    report.listening("http://here", config.load_models)
    signal.sigwait([signal.SIGTERM])
    return 0
server = types.ModuleType("marserve.frontend.server")
server.serve = serve
sys.modules[server.__name__] = server
"""


@pytest.fixture
def start(tmp_path, pid_path, monkeypatch):
    """Runs the command that starts a server; ``--models`` says how that goes."""
    (tmp_path / "sitecustomize.py").write_text(STAND_IN)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "marserve.frontend", "--start", "--model-store", "store"]

    def run(models):
        return subprocess.Popen([*command, "--models", models], stdout=subprocess.PIPE, text=True)

    return run


@pytest.mark.integration
def test_start_leaves_a_detached_server_that_stop_ends(start, pid_path):
    with start("a.mar") as starter:
        assert starter.wait(30) == 0
        pid = PidFile().read()
        assert pid is not None
        assert pid != starter.pid
        assert os.getsid(pid) == pid
        assert starter.stdout
        assert starter.stdout.readline() == "Model server started.\n"
        assert starter.stdout.readline() == (
            "The server listens at http://here and is still loading models (a.mar); "
            "ask http://here/ready.\n"
        )
        assert main(["--stop"]) == 0
        assert starter.stdout.read() == ""  # no process keeps the terminal open
    assert not pid_path.exists()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("models", "reason"), [("fails", "no port\n"), ("dies", "it ended with status 7; ")]
)
def test_a_start_that_failed_is_reported_with_its_reason(models, reason, start, pid_path):
    with start(models) as starter:
        output, _ = starter.communicate(timeout=30)
        assert starter.returncode == 1
        assert output.startswith(f"The server did not start: {reason}")
    assert not pid_path.exists()
