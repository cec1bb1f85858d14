import contextlib
import errno
import io
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

import pytest

from marserve.frontend.logs.config import configure_logging
from marserve.frontend.logs.formats import one_line, timestamp
from marserve.frontend.logs.levels import logger_levels
from marserve.frontend.logs.setup import (
    DETAIL,
    explain_unwritable,
    is_journal,
    log_directories,
    reopen_log_files,
)
from marserve.frontend.logs.writers import wait_written

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"


def configure(directory: Path, console: TextIO, **options: bool) -> contextlib.ExitStack:
    with contextlib.redirect_stdout(console):
        return configure_logging(directory / "logs", directory / "metrics", **options)


@pytest.fixture
def console(tmp_path):
    console = io.StringIO()
    with configure(tmp_path, console):
        yield console


@pytest.mark.parametrize(
    ("logger", "file", "line", "on_console"),
    [
        ("marserve.api", "logs/ts_log.log", r"TIME \[INFO \] THREAD marserve.api - hello", True),
        ("MODEL_LOG", "logs/model_log.log", r"TIME \[INFO \] THREAD MODEL_LOG - hello", True),
        ("ACCESS_LOG", "logs/access_log.log", "hello", False),
        ("TS_METRICS", "metrics/ts_metrics.log", "hello", False),
        ("MODEL_METRICS", "metrics/model_metrics.log", "hello", False),
    ],
)
def test_each_logger_has_its_file_and_format(logger, file, line, on_console, console, tmp_path):
    logging.getLogger(logger).info("hello")
    assert wait_written()
    line = line.replace("TIME", TIME).replace("THREAD", "main") + "\n"
    for path in tmp_path.glob("*/*.log"):
        written = path.read_text()
        if path == tmp_path / file:
            assert re.fullmatch(line, written)
        else:
            assert written == ""
    assert re.fullmatch(line if on_console else "", console.getvalue())


def test_a_worker_is_named_instead_of_the_thread(console, tmp_path):
    extra = {"worker": "W-9000-resnet_1.0-stderr"}
    logging.getLogger("MODEL_LOG").warning("oops", extra=extra)
    assert wait_written()
    expected = TIME + r" \[WARN \] W-9000-resnet_1\.0-stderr MODEL_LOG - oops\n"
    assert re.fullmatch(expected, (tmp_path / "logs" / "model_log.log").read_text())


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ("größer \N{GRINNING FACE}", "größer \N{GRINNING FACE}"),
        ("x\n2026-11-20T21:30:00,000 [ERROR]", r"x\n2026-11-20T21:30:00,000 [ERROR]"),
        ("\x1b[2J\x07\0\r\x85\u2028\ud800", r"\x1b[2J\x07\x00\r\x85\u2028\ud800"),
        (ValueError("a\tb"), r"a\tb"),
        ("GET https://u:pass@h:1/a@b?sig=x#y failed", "GET https://h:1/a@b failed"),
        ("url='s3://KEY:SECRET@b/m.mar?X-Amz-Signature=x', ...", "url='s3://b/m.mar ..."),
    ],
)
def test_one_line_escapes_control_characters_and_secrets(sent, text):
    assert one_line(sent) == text


def test_the_console_escapes_what_its_encoding_lacks(tmp_path, monkeypatch):
    screen = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(screen, encoding="ascii"))
    with configure_logging(tmp_path, tmp_path):
        logging.getLogger("marserve.api").info("grün \ud800")
        assert wait_written()
        sys.stdout.flush()
    assert screen.getvalue().endswith(b" - gr\\xfcn \\ud800\n")
    assert (tmp_path / "ts_log.log").read_text("utf-8").endswith(" - grün \\ud800\n")


def test_a_few_lines_after_a_pause_are_written_at_once(tmp_path):
    def seconds_for_six(number):
        with configure_logging(tmp_path / str(number), tmp_path / str(number)):
            began = time.monotonic()
            for _ in range(6):  # each waits for the one before
                logging.getLogger("MODEL_METRICS").info("line")
                assert wait_written()
            return time.monotonic() - began

    # A rest after each takes 10 ms; another process may take the core in some of the rounds.
    assert any(seconds_for_six(number) < 0.04 for number in range(10))


@pytest.mark.parametrize("name", ["asyncio", "marserve"])
def test_failures_reach_the_server_log_with_their_cause(name, console, tmp_path):
    logging.getLogger(name).error("failed", exc_info=RuntimeError("deep down"))
    assert wait_written()
    written = (tmp_path / "logs" / "ts_log.log").read_text()
    assert re.match(TIME + rf" \[ERROR\] \S+ {name} - failed\nRuntimeError: deep down\n", written)
    assert written.count("failed") == 1


def test_other_libraries_are_quiet_below_warnings(console):
    logging.getLogger("asyncio").info("chatter")
    assert wait_written()
    assert console.getvalue() == ""


def test_levels_can_be_changed_and_seen(console):
    child = "marserve.frontend.logs_test"
    logging.getLogger(child).info("shown")
    logging.getLogger("marserve").setLevel(logging.ERROR)
    logging.getLogger(child).warning("hidden")
    levels = logger_levels()
    assert levels["marserve"] == levels[child] == logging.ERROR
    logging.getLogger(child).setLevel(logging.DEBUG)
    logging.getLogger(child).debug("shown too")
    logging.getLogger(child).setLevel(logging.NOTSET)
    logging.getLogger(child).warning("hidden")
    logging.getLogger("root").setLevel(logging.DEBUG)
    assert logging.getLogger().level == logging.DEBUG
    assert wait_written()
    assert re.findall(r"- (.+)\n", console.getvalue()) == ["shown", "shown too"]


def test_every_file_has_a_logger_with_a_level(console):
    names = ["root", "marserve", "MODEL_LOG", "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS"]
    levels = logger_levels()
    assert list(levels)[:6] == names
    assert [levels[name] for name in names] == [logging.WARNING, *[logging.INFO] * 5]


def test_records_can_be_json(tmp_path):
    console = io.StringIO()
    with configure(tmp_path, console, as_json=True):
        logging.getLogger("MODEL_LOG").warning("oops \n", extra={"worker": "W-1-stderr"})
        logging.getLogger("marserve").error("failed", exc_info=RuntimeError("deep down"))
        logging.getLogger("ACCESS_LOG").info("as it comes")
    oops, failed = map(json.loads, console.getvalue().splitlines())
    assert re.fullmatch(TIME, oops.pop("time"))
    assert oops == {
        "level": "WARN",
        "thread": "W-1-stderr",
        "logger": "MODEL_LOG",
        "message": "oops \n",
    }
    assert failed["thread"] == "main"
    assert failed["exception"] == "RuntimeError: deep down"
    assert (tmp_path / "logs" / "model_log.log").read_text() + (
        tmp_path / "logs" / "ts_log.log"
    ).read_text() == (console.getvalue())
    assert (tmp_path / "logs" / "access_log.log").read_text() == "as it comes\n"


def test_threads_write_in_order_and_to_the_last(tmp_path):
    before = threading.active_count()
    with configure_logging(tmp_path, tmp_path):
        assert threading.active_count() == before + 6  # five files and the console
        for number in range(1000):
            logging.getLogger("MODEL_LOG").info("%d", number, extra={"worker": "W-1"})
        logging.getLogger("marserve").error("failed", exc_info=RuntimeError("deep down"))
    assert threading.active_count() == before
    written = (tmp_path / "model_log.log").read_text()
    assert re.findall(r"W-1 MODEL_LOG - (\d+)\n", written) == list(map(str, range(1000)))
    assert "failed\nRuntimeError: deep down\n" in (tmp_path / "ts_log.log").read_text()


def _state() -> list[object]:
    names = ("", "marserve", "MODEL_LOG", "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
    loggers = [logging.getLogger(name) for name in names]
    return [(each.level, each.propagate, list(each.handlers)) for each in loggers]


def test_close_restores_the_loggers(tmp_path):
    before = _state()
    opened = configure_logging(tmp_path, tmp_path)
    assert _state() != before
    opened.close()
    assert _state() == before


def test_a_failed_start_leaves_nothing_open(tmp_path):
    (tmp_path / "access_log.log").mkdir()
    before = _state()
    with pytest.raises(OSError, match="access_log"):
        configure_logging(tmp_path, tmp_path)
    assert _state() == before


@pytest.mark.parametrize(
    ("place", "variable"), [("logs", "LOG_LOCATION"), ("metrics", "METRICS_LOCATION")]
)
def test_an_error_names_the_folder_and_its_variable(place, variable, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / place).write_text("a file in the place of the folder")
    environ = {"LOG_LOCATION": "logs", "METRICS_LOCATION": "metrics"}
    with pytest.raises(OSError, match="exists") as caught:
        configure_logging(*log_directories(environ))
    assert explain_unwritable(caught.value, environ) == (
        f"The logs cannot be written: {tmp_path / place}: File exists. "
        f"Set {variable} to a directory in which this user may write."
    )


def test_an_error_in_a_folder_of_a_log_configuration_names_no_variable(tmp_path):
    error = PermissionError(
        errno.EACCES, "Permission denied", str(tmp_path / "elsewhere" / "a.log")
    )
    environ = {"LOG_LOCATION": str(tmp_path / "logs")}
    assert explain_unwritable(error, environ) == (
        f"The logs cannot be written: {tmp_path / 'elsewhere' / 'a.log'}: Permission denied."
    )


def test_a_console_without_a_reader_is_not_reported(tmp_path, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with (
        contextlib.suppress(BrokenPipeError),
        os.fdopen(writer, "w") as pipe,
        configure(tmp_path, pipe),
    ):
        logging.getLogger("MODEL_LOG").info("to the file")
    assert "to the file" in (tmp_path / "logs" / "model_log.log").read_text()
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (Path("logs"), Path("logs"))),
        ({"LOG_LOCATION": "", "METRICS_LOCATION": "/m"}, (Path("logs"), Path("/m"))),
        ({"LOG_LOCATION": "/l"}, (Path("/l"), Path("logs"))),
    ],
)
def test_the_environment_names_the_directories(environ, expected):
    assert log_directories(environ) == expected


def test_a_timestamp_has_comma_milliseconds():
    assert re.fullmatch(TIME, timestamp(1_795_210_584.001))
    assert timestamp(1.25).endswith(":01,250")


@pytest.mark.parametrize("verbose", [False, True])
def test_details_are_for_the_file_and_a_verbose_console(tmp_path, verbose):
    console = io.StringIO()
    with configure(tmp_path, console, verbose=verbose):
        logging.getLogger("marserve").info("settings", extra=DETAIL)
    assert "settings" in (tmp_path / "logs" / "ts_log.log").read_text()
    assert ("settings" in console.getvalue()) == verbose


def test_files_that_were_moved_are_reopened(tmp_path):
    with configure_logging(tmp_path, tmp_path):
        for name in ("access_log.log", "ts_log.log"):
            (tmp_path / name).rename(tmp_path / f"{name}.1")
        reopen_log_files()
        logging.getLogger("ACCESS_LOG").info("request")
        logging.getLogger("marserve").info("hello")
    assert (tmp_path / "access_log.log").read_text() == "request\n"
    assert "hello" in (tmp_path / "ts_log.log").read_text()


def test_each_line_for_the_journal_has_a_priority(tmp_path, monkeypatch):
    # systemd passes a socket, and names it by device and inode.
    ours, journal = socket.socketpair()
    status = os.fstat(ours.fileno())
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    with ours, journal, ours.makefile("w") as console:
        with configure(tmp_path, console):
            logging.getLogger("marserve").info("fine")
            logging.getLogger("marserve").error("two\nlines")
            logging.getLogger("MODEL_LOG").warning("hm")
        lines = journal.recv(4096).decode().splitlines()
    assert [line[:3] for line in lines] == ["<6>", "<3>", "<3>", "<4>"]
    assert lines[2] == "<3>lines"
    assert "<" not in (tmp_path / "logs" / "ts_log.log").read_text()


def test_only_the_journal_itself_gets_priorities(console, monkeypatch):
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    with Path(os.devnull).open("w") as elsewhere:
        assert not is_journal(elsewhere)
    assert not is_journal(console)  # has no descriptor
