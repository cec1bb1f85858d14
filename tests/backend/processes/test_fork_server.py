"""The fork server by itself: what it answers to a frontend of one socket."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from marserve.backend.processes.fork_server import WorkerSetup, command

pytestmark = pytest.mark.integration

SECONDS = 20.0
WITHOUT_PIDFDS = """
import errno, os

def pidfd_open(pid):
    raise OSError(errno.ENOSYS, "not here")

os.pidfd_open = pidfd_open
"""
Ask = Callable[..., tuple[dict[str, Any], list[int]]]


@pytest.fixture(params=["", WITHOUT_PIDFDS], ids=["pidfds", "no pidfds"])
def ask(request: pytest.FixtureRequest) -> Iterator[Ask]:
    """Ask a fork server something; without arguments, nothing but the next answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(SECONDS)
    with ours:
        with theirs:
            python, option, code, *arguments = command(
                sys.executable, theirs.fileno(), ["colorsys", "no_such_module"]
            )
            code = f"{request.param}\n{code}"
            process = subprocess.Popen(
                [python, option, code, *arguments], pass_fds=[theirs.fileno()]
            )

        def exchange(text: str = "", *descriptors: int) -> tuple[dict[str, Any], list[int]]:
            if text:
                socket.send_fds(ours, [text.encode()], descriptors)
            data, found, _, _ = socket.recv_fds(ours, 1024, 1)
            return json.loads(data), found

        assert exchange() == ({}, [])
        yield exchange
    assert process.wait(SECONDS) == 0


def worker_descriptors(sock: int, output: int) -> tuple[int, ...]:
    setup = WorkerSetup(environment={"A": "é"}, python_path=(), model_dir="/", threads=0)
    told, telling = os.pipe()
    os.write(telling, setup.to_bytes())
    os.close(telling)
    return sock, output, output, told


def test_a_worker_is_forked_and_reaped_when_its_end_was_seen(ask: Ask) -> None:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    given = worker_descriptors(theirs.fileno(), writing)
    with ours:
        answer, (sentinel,) = ask("fork", *given)
        theirs.close()
        os.close(writing)
        os.close(given[-1])
        assert select.select([sentinel], [], [], 0)[0] == []
    assert select.select([sentinel], [], [], SECONDS)[0] == [sentinel]
    os.close(sentinel)
    with os.fdopen(reading) as output:
        lines = output.read().splitlines()
    assert lines[0] == f"[PID]{answer['pid']}"
    assert lines[-1] == "Frontend disconnected."
    assert ask(str(answer["pid"])) == ({"status": 0}, [])


def test_what_cannot_be_done_is_answered(ask: Ask) -> None:
    for request in (str(os.getpid()), "nonsense"):
        answer, _ = ask(request)
        assert answer["error"]


def test_a_setup_survives_its_file() -> None:
    setup = WorkerSetup(
        environment={"A": "\udcff", "B": "x" * 1_000_000},
        python_path=("/a b", "/c"),
        model_dir="/m",
        threads=2,
    )
    assert WorkerSetup.from_bytes(setup.to_bytes()) == setup
