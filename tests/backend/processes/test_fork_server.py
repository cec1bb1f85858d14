"""The fork server by itself: what it answers to a frontend of one socket."""

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from marserve.backend.processes.fork_server import command
from marserve.backend.worker import WorkerPlace

pytestmark = pytest.mark.integration

SECONDS = 20.0
WITHOUT_PIDFDS = """
import errno, os

def pidfd_open(pid):
    raise OSError(errno.ENOSYS, "not here")

os.pidfd_open = pidfd_open
"""
# A module that is preloaded may leave something to do at the end.
FINALIZED = "finalized"
WITH_FINALIZER = f"""
import weakref

class Thing:
    pass

thing = Thing()
weakref.finalize(thing, print, {FINALIZED!r})
"""
Ask = Callable[..., tuple[dict[str, Any], list[int]]]


@pytest.fixture(params=["", WITHOUT_PIDFDS], ids=["pidfds", "no pidfds"])
def ask(request, tmp_path):
    """Ask a fork server something; without arguments, nothing but the next answer."""
    (tmp_path / "with_finalizer.py").write_text(WITH_FINALIZER)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(SECONDS)
    with ours:
        with theirs:
            python, option, code, *arguments = command(
                sys.executable, theirs.fileno(), ["with_finalizer", "no_such_module"]
            )
            code = f"{request.param}\n{code}"
            process = subprocess.Popen(
                [python, option, code, *arguments],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(tmp_path)},
                stdout=subprocess.PIPE,
                text=True,
            )

        def exchange(text="", *descriptors):
            if text:
                socket.send_fds(ours, [text.encode()], descriptors)
            data, found, _, _ = socket.recv_fds(ours, 1024, 1)
            return json.loads(data), found

        assert exchange() == ({}, [])
        yield exchange
    output, _ = process.communicate(timeout=SECONDS)
    assert (process.returncode, output) == (0, f"{FINALIZED}\n")


def worker_descriptors(sock: int, output: int) -> tuple[int, ...]:
    place = WorkerPlace(environment={"A": "é"}, python_path=(), model_dir="/", threads=0)
    told, telling = os.pipe()
    os.write(telling, place.to_text().encode())
    os.close(telling)
    return sock, output, output, told


def test_a_worker_is_forked_and_reaped_when_its_end_was_seen(ask):
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
    assert lines[-1] == "Frontend disconnected."  # nothing is finalized that was preloaded
    assert ask(str(answer["pid"])) == ({"status": 0}, [])


def test_what_cannot_be_done_is_answered(ask):
    for request in (str(os.getpid()), "nonsense"):
        answer, _ = ask(request)
        assert answer["error"]


def test_a_place_survives_its_file():
    place = WorkerPlace(
        environment={"A": "\udcff", "B": "x" * 1_000_000},
        python_path=("/a b", "/c"),
        model_dir="/m",
        threads=2,
    )
    assert WorkerPlace.from_text(place.to_text().encode()) == place
