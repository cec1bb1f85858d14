"""A stop ends within its promised time, whatever of the server hangs."""

import contextlib
import signal
import subprocess
import time

import pytest

from marserve.frontend.lifecycle.daemon import FORCED_END_SECONDS

pytestmark = pytest.mark.integration

# Imported by every process of the server at its start; acts in the server alone, when it is told.
HOOKS = {
    "the event loop hangs": """
import signal, sys, time
def hang(*_):
    time.sleep(600)
if "--foreground" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, hang)
""",
    "the event loop is busy": """
import signal, sys
def spin(*_):
    while True:
        pass
if "--foreground" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, spin)
""",
    "a thread that the exit waits for hangs": """
import signal, sys, threading
def hang(*_):
    threading.Thread(target=threading.Event().wait, name="hung").start()
if "--foreground" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, hang)
""",
    "the log hangs": """
import logging, signal, sys, threading
def hang(*_):
    for handler in logging.getLogger().handlers + logging.getLogger("marserve").handlers:
        threading.Thread(target=handler.acquire, daemon=True).start()
    threading.Thread(target=threading.Event().wait, name="hung").start()
if "--foreground" in sys.orig_argv:
    signal.signal(signal.SIGUSR1, hang)
""",
}
# The log cannot be written where the log is what hangs.
LOGGED = {
    "the event loop hangs": "sitecustomize.py",
    "the event loop is busy": "in spin",
    "a thread that the exit waits for hangs": "threading.py",
}


@pytest.fixture
def hooked(prepare_server, tmp_path, handlers):
    def start(hook, **properties):
        (tmp_path / "sitecustomize.py").write_text(HOOKS[hook])
        server = stack.enter_context(prepare_server(drain_timeout="0", **properties))
        server.environment["PYTHONPATH"] = str(tmp_path)
        server.start()
        server.install(handlers / "lab.py", "lab")
        return server

    with contextlib.ExitStack() as stack:
        yield start


@pytest.mark.parametrize("hook", HOOKS)
def test_a_stop_ends_in_time_although(hooked, hook):
    server = hooked(hook, stop_grace="1")
    server.terminate(signal.SIGUSR1)
    time.sleep(0.1)  # the signals' order, which the kernel does not promise
    began = time.monotonic()
    server.terminate()
    assert server.process.wait(20) == 1
    assert 1 <= time.monotonic() - began < 1 + FORCED_END_SECONDS
    server.assert_nothing_left()
    assert not (server.temp / ".model_server.pid").exists()
    if hook in LOGGED:
        log = server.log("ts_log.log") + server.console_text()  # the log may be closed by then
        _, sentence, stacks = log.partition("The stop took more than 1 s")
        assert sentence
        assert LOGGED[hook] in stacks


def test_the_command_stop_waits_for_the_end_by_force(hooked, command):
    """It said that stopping took too long, and the server lived on."""
    server = hooked("the event loop hangs", stop_grace="1")
    server.terminate(signal.SIGUSR1)
    stopped = command(server, "--stop")
    assert "TorchServe has stopped." in stopped
    assert server.process.wait(20) == 1
    server.assert_nothing_left()


@pytest.fixture
def command():
    def run(server, *arguments):
        done = subprocess.run(
            [server.program, *arguments],
            cwd=server.directory,
            env=server.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return done.stdout

    return run
