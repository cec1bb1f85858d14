"""Handlers that print without end, and a console that takes nothing: nobody else waits for them."""

import os
import subprocess
import time

import pytest
from servers import PATIENCE, TORCHSERVE

pytestmark = pytest.mark.integration

LINES = 100_000
PRINTS = """
import threading

def print_all(count):
    for number in range(count):
        print("a line of a handler that prints much", number)

def handle(data, context):
    for row in data or ():
        count = int(bytes(row["body"]))
        threading.Thread(target=print_all, args=(count,), daemon=True).start()
    return data and ["printing"] * len(data)
"""
WITHOUT_END = b"1000000000"
# The documented time of a stop, for the case that all are held up.
STOP_SECONDS = 20


@pytest.fixture
def unread(prepare_server):
    """A server whose standard output is a pipe, and the end of it that nobody reads."""
    reader, writer = os.pipe()
    with prepare_server() as server:
        with os.fdopen(writer, "wb") as console:
            server.process = subprocess.Popen(
                [TORCHSERVE, "--foreground", "--ncs"],
                cwd=server.directory,
                env=server.environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server.wait_ready()
        server.install(PRINTS, "prints")
        server.install(PRINTS, "quiet")
        with os.fdopen(reader, "rb") as file:
            yield server, file


def test_each_line_of_a_handler_that_prints_much_is_logged_once_and_in_order(server):
    server.install(PRINTS, "much")
    assert server.predict("much", data=str(LINES).encode()).ok
    last = f"that prints much {LINES - 1}\n"
    server.wait_logged("model_log.log", last)
    found = [
        int(line.rpartition(" ")[2])
        for line in server.log("model_log.log").splitlines()
        if "MODEL_LOG - a line of a handler that prints much " in line
    ]
    assert found == list(range(LINES))


def test_a_handler_that_prints_without_end_keeps_no_other_model_waiting(server):
    """The fixture `no_slow_turn` fails if a turn of the event loop takes 50 ms."""
    server.install(PRINTS, "endless")
    server.install(PRINTS, "other")
    assert server.predict("endless", data=WITHOUT_END).ok
    server.wait_logged("model_log.log", "that prints much 100000\n")
    for _ in range(50):
        assert server.predict("other", data=b"0").ok
        assert server.inference("GET", "/ping").ok
    server.unregister_all()


def test_a_console_that_takes_nothing_stops_neither_the_server_nor_the_files(unread, wait_for):
    server, console = unread
    assert server.predict("prints", data=WITHOUT_END).ok
    dropped = 'marserve_dropped_log_lines{target="Console"'
    wait_for(lambda: any(n for k, n in server.metrics(dropped[:26]).items() if dropped in k))
    assert server.predict("quiet", data=b"3").ok
    server.wait_logged("model_log.log", "quiet_1.0-stdout MODEL_LOG - a line")
    server.wait_logged("ts_log.log", "Console takes no log lines; some will be missing.")
    assert server.management("DELETE", "/models/prints").ok
    text = b""
    while b"log lines are missing here" not in text:
        text = text[-1000:] + console.read1(1 << 20)
    server.terminate()
    while console.read1(1 << 20):
        pass
    assert server.process.wait(PATIENCE) == 0
    assert text.count(b"are missing here") == 1


def test_a_console_that_takes_nothing_does_not_delay_the_stop(unread):
    server, _ = unread
    assert server.predict("prints", data=WITHOUT_END).ok
    server.wait_logged("ts_log.log", "Console takes no log lines; some will be missing.")
    began = time.monotonic()
    server.terminate()
    assert server.process.wait(PATIENCE) == 0
    assert time.monotonic() - began < STOP_SECONDS
    server.assert_nothing_left()
