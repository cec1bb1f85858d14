import logging
import os
import socket

import pytest

from marserve.frontend.lifecycle.service_manager import ServiceManager


@pytest.fixture
def listener():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(5)
        yield listener


def received(listener: socket.socket) -> str:
    return listener.recv(4096).decode()


def test_each_message_is_a_datagram_of_lines(listener, tmp_path):
    path = str(tmp_path / "notify")
    listener.bind(path)
    manager = ServiceManager(path)
    manager.main_process(7)
    assert received(listener) == "MAINPID=7"
    manager.ready("Listens at http://here")
    assert received(listener) == "READY=1\nSTATUS=Listens at http://here"
    manager.alive()
    assert received(listener) == "WATCHDOG=1"
    manager.stopping(1.5)
    assert received(listener) == "STOPPING=1\nEXTEND_TIMEOUT_USEC=1500000\nSTATUS=Stopping."


def test_an_abstract_name_begins_with_an_at(listener):
    name = f"marserve-test-{os.getpid()}"
    listener.bind(f"\0{name}")
    ServiceManager(f"@{name}").main_process(7)
    assert received(listener) == "MAINPID=7"


def test_children_do_not_inherit_it():
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "OTHER": "stays"}
    ServiceManager.from_environ(environ)
    assert environ == {"OTHER": "stays"}


def test_without_a_receiver_nothing_is_sent():
    ServiceManager.from_environ({}).ready("Listens.")


def test_a_message_that_cannot_be_sent_is_logged_once(tmp_path, caplog):
    manager = ServiceManager(str(tmp_path / "gone"))
    manager.main_process(7)
    manager.ready("Listens.")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("NOTIFY_SOCKET: 'MAINPID=7' cannot be sent")


def test_a_receiver_that_does_not_read_delays_nothing(listener, tmp_path):
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
        ({"WATCHDOG_USEC": "2000", "WATCHDOG_PID": "1"}, False),  # of another process
        ({"WATCHDOG_USEC": "soon"}, False),
        ({"WATCHDOG_USEC": "9" * 400}, False),
        ({"WATCHDOG_USEC": "9" * 5000}, False),
        ({}, False),
    ],
)
def test_the_interval_of_the_watchdog(environ, is_wanted):
    manager = ServiceManager.from_environ({"NOTIFY_SOCKET": "/x", **environ})
    assert manager.watchdog_seconds == (0.002 if is_wanted else 0)
    assert ServiceManager.from_environ(environ).watchdog_seconds == 0
