import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from marserve.frontend.lifecycle.service_manager import ServiceManager


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(5)
        yield listener


def heard(listener: socket.socket) -> str:
    return listener.recv(4096).decode()


def test_each_message_is_a_datagram_of_lines(listener: socket.socket, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    listener.bind(path)
    manager = ServiceManager(path)
    manager.main_process(7)
    assert heard(listener) == "MAINPID=7"
    manager.ready("Listens at http://here")
    assert heard(listener) == "READY=1\nSTATUS=Listens at http://here"
    manager.alive()
    assert heard(listener) == "WATCHDOG=1"
    manager.stopping(1.5)
    assert heard(listener) == "STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000\nSTATUS=Stopping."


def test_an_abstract_name_begins_with_an_at(listener: socket.socket) -> None:
    name = f"marserve-test-{os.getpid()}"
    listener.bind(f"\0{name}")
    ServiceManager(f"@{name}").main_process(7)
    assert heard(listener) == "MAINPID=7"


def test_children_do_not_inherit_it() -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "OTHER": "stays"}
    ServiceManager.taken_from(environ)
    assert environ == {"OTHER": "stays"}


def test_nobody_wants_to_be_told() -> None:
    ServiceManager.taken_from({}).ready("Listens.")


def test_one_warning_where_it_cannot_be_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = ServiceManager(str(tmp_path / "gone"))
    manager.main_process(7)
    manager.ready("Listens.")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("Whoever started the server cannot be told 'MAINPID=7'")


def test_one_that_does_not_read_holds_nobody_up(listener: socket.socket, tmp_path: Path) -> None:
    path = str(tmp_path / "notify")
    listener.bind(path)
    manager = ServiceManager(path)
    for _ in range(10_000):  # more than its queue takes
        manager.main_process(7)


@pytest.mark.parametrize(
    ("environ", "is_wanted"),
    [
        ({"WATCHDOG_USEC": "2000"}, True),
        ({"WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())}, True),
        ({"WATCHDOG_USEC": "2000", "WATCHDOG_PID": "1"}, False),  # meant for another process
        ({"WATCHDOG_USEC": "soon"}, False),
        ({}, False),
    ],
)
def test_when_the_watchdog_wants_to_hear_of_it(environ: dict[str, str], is_wanted: bool) -> None:
    manager = ServiceManager.taken_from({"NOTIFY_SOCKET": "/x", **environ})
    assert manager.watchdog_seconds == (0.002 if is_wanted else 0)
    assert ServiceManager.taken_from(environ).watchdog_seconds == 0  # there is nobody to tell
