"""``--debug-handler`` in a real terminal: a server whose standard streams are a pseudo-terminal."""

import contextlib
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import requests
from servers import PATIENCE, TORCHSERVE, Server, make_archive
from terminal import Terminal

pytestmark = pytest.mark.integration

TEXT = {"Content-Type": "text/plain"}
HANDLER = """
import time

def handle(data, context):
    if data is None:
        return
    order = data[0]["body"]
    if order == "stop here":
        breakpoint()
    if order == "raise":
        raise KeyError("no such colour")
    if order == "exit":
        raise SystemExit(3)
    if order == "sleep":
        print("going to sleep")
        time.sleep(60)
    return [f"{order} 1"] * len(data)
"""


@pytest.fixture(scope="module")
def terminal():
    with contextlib.closing(Terminal()) as opened:
        yield opened


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("project") / "my_handler.py"
    path.write_text(HANDLER)
    return path


@pytest.fixture(scope="module")
def server(prepare_server, terminal, source):
    """A server that holds the terminal; its timeouts are shorter than anybody can type."""
    with prepare_server(default_response_timeout="1", default_startup_timeout="1") as prepared:
        make_archive(prepared.store, "def handle(data, context):\n    return ['packed']", "m")
        start(prepared, terminal, f"m={source}")
        terminal.wait("Debugging m:")
        prepared.wait_ready()
        yield prepared


def start(server: Server, terminal: Terminal, debugged: str, *arguments: str) -> None:
    flags = ["--start", "--foreground", "--ncs", "--models", "m=m.mar", "--debug-handler", debugged]
    server.process = terminal.start(
        [TORCHSERVE, *flags, *arguments], server.environment, server.directory
    )


Ask = Callable[[str], "Future[requests.Response]"]


@pytest.fixture
def ask(server, background):
    """Send a text and do not wait for the answer."""
    return lambda text: background(server.predict, "m", data=text, headers=TEXT)


def test_a_file_replaces_the_handler_of_the_archive(ask):
    assert ask("hello").result(PATIENCE).text == "hello 1"


def test_the_prompt_edits_lines_and_no_timeout_ends_it(server, terminal, ask):
    answer = ask("stop here")
    terminal.wait("(Pdb) ")
    with pytest.raises(requests.Timeout):  # longer than the response timeout
        server.predict("m", data="another", timeout=1.5)
    terminal.type("p odex\x7f\x1b[D\x1b[Dr\x05r\n")  # deletes, moves, inserts, goes to the end
    terminal.wait("'stop here'")
    terminal.type("order = 'changed'\n")
    terminal.wait("(Pdb) ")
    terminal.type("c\n")
    assert answer.result(PATIENCE).text == "changed 1"


def test_ctrl_c_at_the_prompt_clears_the_line_and_ends_nothing(server, terminal, ask):
    pid = server.worker("m")["pid"]
    answer = ask("stop here")
    terminal.wait("(Pdb) ")
    terminal.type("order = \x03")
    terminal.wait("(Pdb) ")
    terminal.type("c\n")
    assert answer.result(PATIENCE).text == "stop here 1"
    assert server.worker("m")["pid"] == pid
    assert server.is_running


def test_ctrl_c_interrupts_a_handler_that_hangs(terminal, ask):
    answer = ask("sleep")
    terminal.wait("going to sleep")
    terminal.type("\x03")
    assert "time.sleep(60)" in "".join(answer.result(PATIENCE).json()["traceback"])


@pytest.mark.parametrize(
    ("order", "line"),
    [("raise", 'raise KeyError("no such colour")'), ("exit", "raise SystemExit(3)")],
)
def test_the_answer_holds_the_traceback_and_the_worker_lives(server, ask, order, line):
    pid = server.worker("m")["pid"]
    answer = ask(order).result(PATIENCE)
    assert answer.status_code == 503
    document = answer.json()
    assert document["message"] == "Prediction failed"
    assert f"    {line}" in document["traceback"]
    assert document["traceback"][1].endswith("in handle")  # the author's frames come first
    assert server.worker("m")["pid"] == pid


def test_quitting_the_debugger_ends_the_request_alone(terminal, ask):
    answer = ask("stop here")
    terminal.wait("(Pdb) ")
    terminal.type("q\n")
    assert "bdb.BdbQuit" in answer.result(PATIENCE).json()["traceback"]
    assert ask("hello").result(PATIENCE).text == "hello 1"


def test_an_edited_file_is_loaded_anew_at_the_next_request(source, ask):
    source.write_text(HANDLER.replace("{order} 1", "{order} 2"))
    assert ask("hello").result(PATIENCE).text == "hello 2"


def test_a_mistake_is_told_until_it_is_mended(source, ask, terminal):
    source.write_text(HANDLER.replace("return [f", "return [f("))
    document = ask("hello").result(PATIENCE).json()
    assert document["message"].startswith("The model cannot be loaded: SyntaxError")
    source.write_text(HANDLER)
    assert ask("hello").result(PATIENCE).text == "hello 1"


def test_a_breakpoint_while_the_model_loads(source, ask, terminal):
    source.write_text("breakpoint()\n" + HANDLER)
    answer = ask("hello")
    terminal.wait("(Pdb) ")
    terminal.type("c\n")
    assert answer.result(PATIENCE).text == "hello 1"
    source.write_text(HANDLER)
    assert ask("hello").result(PATIENCE).text == "hello 1"


def test_there_is_one_worker_however_many_are_asked_for(server):
    server.management("PUT", "/models/m", params={"min_worker": 3, "synchronous": "true"})
    assert len(server.describe("m")["workers"]) == 1


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Origin": "http://evil.example"},
        {"X-Forwarded-For": "203.0.113.9"},
    ],
)
def test_web_pages_and_proxies_are_kept_from_tracebacks(server, headers):
    answer = server.predict("m", data="raise", headers=headers)
    assert answer.status_code == 403
    assert "traceback" not in answer.text


def test_a_server_that_is_told_to_stop_at_a_prompt_leaves_the_terminal_as_it_was(
    prepare_server, source, background
):
    with prepare_server() as server, contextlib.closing(Terminal()) as terminal:
        make_archive(server.store, HANDLER, "m")
        start(server, terminal, "m")
        terminal.wait("Debugging m:")
        server.wait_ready()
        background(server.predict, "m", data="stop here", headers=TEXT)
        terminal.wait("(Pdb) ")
        assert not terminal.echoes
        server.terminate(signal.SIGTERM)
        assert server.process is not None
        assert server.process.wait(PATIENCE) == 0
        assert terminal.echoes
        server.assert_nothing_left()


def test_a_terminal_that_is_closed_at_a_prompt_ends_the_server(prepare_server, background):
    terminal = Terminal()
    with prepare_server() as server:
        make_archive(server.store, HANDLER, "m")
        start(server, terminal, "m")
        terminal.wait("Debugging m:")
        server.wait_ready()
        background(server.predict, "m", data="stop here", headers=TEXT)
        terminal.wait("(Pdb) ")
        terminal.hang_up()
        assert server.process is not None
        assert server.process.wait(PATIENCE) == 0
        server.assert_nothing_left()


def test_a_handler_without_a_server_has_the_terminal(tmp_path):
    make_archive(tmp_path, HANDLER, "m")
    (tmp_path / "a.txt").write_text("stop here")
    with contextlib.closing(Terminal()) as terminal:
        terminal.start(
            [TORCHSERVE.with_name("marserve"), "run", "m.mar", "--input", "a.txt"],
            os.environ,
            tmp_path,
        )
        terminal.wait("(Pdb) ")
        terminal.type("order = 'chs\x7fanged'\n")
        terminal.wait("(Pdb) ")
        terminal.type("c\n")
        terminal.wait("changed 1")


def test_ctrl_c_without_a_request_stops_the_server(server, terminal):
    """The last of them."""
    terminal.type("\x03")
    terminal.wait("TorchServe has stopped.")
    assert server.process is not None
    assert server.process.wait(PATIENCE) == 0
    server.assert_nothing_left()
