"""``marserve-init`` as an ordinary process; as the first of a container: tests/deploy."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from servers import PATIENCE
from terminal import Terminal

INIT = Path(sys.executable).with_name("marserve-init")
# Reports that it is the server; its exit status is the number of interrupts before SIGTERM.
SERVER = """
import os, signal, socket, sys
from marserve.frontend.lifecycle.service_manager import ServiceManager
interrupts = []
signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
manager = ServiceManager(os.environ["NOTIFY_SOCKET"])
def stop(*_):
    manager.stopping(1)
    sys.exit(len(interrupts))
signal.signal(signal.SIGTERM, stop)
manager.main_process(os.getpid())
manager.ready("Listens.")
print("ready", flush=True)
while True:
    signal.pause()
"""


def start(*command: str, stdin: int | None = None, **environment: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [INIT, *command],
        stdin=stdin,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture
def listener(tmp_path):
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.bind(str(tmp_path / "notify"))
    bound.settimeout(PATIENCE)
    return bound


def test_messages_are_forwarded_without_the_process_id(listener, tmp_path):
    environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_PID": "1"}
    with listener, start(sys.executable, "-c", SERVER, **environment) as init:
        assert listener.recv(1000) == b"READY=1\nSTATUS=Listens."
        init.terminate()
        assert init.wait(PATIENCE) == 0


def test_other_signals_are_forwarded_to_the_server_only():
    catcher = "import signal, sys; signal.signal(signal.SIGHUP, lambda *_: sys.exit(5));"
    with start(sys.executable, "-c", catcher + SERVER) as init:
        assert init.stdout is not None
        assert init.stdout.readline() == "ready\n"
        init.send_signal(signal.SIGHUP)
        assert init.wait(PATIENCE) == 5


def test_the_status_of_a_stopped_command_is_not_that_of_the_server():
    script = 'trap "exit 143" TERM; "$0" -c "$1"'
    with start("sh", "-c", script, sys.executable, SERVER) as init:
        assert init.stdout is not None
        assert init.stdout.readline() == "ready\n"
        init.terminate()
        assert init.wait(PATIENCE) == 0


def test_without_pidfds_it_ends_with_the_command_that_started_the_server():
    old_kernel = """
import errno, os, sys
def none(*_):
    raise OSError(errno.ENOSYS, "no pidfds")
os.pidfd_open = none
from marserve.frontend.lifecycle.container_init import main
sys.exit(main())
"""
    script = 'trap : TERM; "$0" -c "$1"'
    words = [sys.executable, "-c", old_kernel, "sh", "-c", script, sys.executable, SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as init:
        assert init.stdout is not None
        assert init.stdout.readline() == "ready\n"
        init.terminate()
        assert init.wait(PATIENCE) == 0


def test_a_server_that_starts_after_the_signal_to_stop_is_stopped():
    script = 'trap : TERM; echo trapped; cat; "$0" -c "$1"'
    with start("sh", "-c", script, sys.executable, SERVER, stdin=subprocess.PIPE) as init:
        assert init.stdout is not None
        assert init.stdin is not None
        assert init.stdout.readline() == "trapped\n"
        init.terminate()
        init.stdin.close()
        assert init.wait(PATIENCE) == 0


def test_malformed_messages_are_ignored():
    malformed = """
import os, socket
pids = "", -1, "x", 0, 1 << 31, "1" * 5000, os.getppid(), 99999999, chr(0x0663)
texts = [f"MAINPID={pid}".encode() for pid in pids]
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    for text in (b"", b"\\xff\\n=", *texts):
        sender.sendto(text, "\\0" + os.environ["NOTIFY_SOCKET"][1:])
raise SystemExit(3)
"""
    with start(sys.executable, "-c", malformed) as init:
        assert init.wait(PATIENCE) == 3


def test_the_id_of_a_thread_does_not_end_it():
    sender = """
import os, socket, threading, time
threading.Thread(target=time.sleep, args=(0.3,)).start()
text = f"MAINPID={threading.enumerate()[-1].native_id}".encode()
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    sender.sendto(text, "\\0" + os.environ["NOTIFY_SOCKET"][1:])
time.sleep(0.3)
raise SystemExit(3)
"""
    with start(sys.executable, "-c", sender) as init:
        assert init.wait(PATIENCE) == 3


def test_ctrl_c_reaches_a_server_at_the_terminal_once(tmp_path):
    terminal = Terminal()
    try:
        init = terminal.start([INIT, sys.executable, "-c", SERVER], os.environ, tmp_path)
        terminal.wait("ready")
        terminal.type("\x03")
        terminal.wait("^C")
        init.terminate()
        assert init.wait(PATIENCE) == 1
    finally:
        terminal.close()


def test_without_a_command():
    with start() as init:
        assert init.wait(PATIENCE) == 2
