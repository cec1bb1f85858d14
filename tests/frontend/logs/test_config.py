import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.logs.config import configure_by_file, read_log_config
from marserve.frontend.logs.levels import OFF, level_word
from marserve.frontend.logs.log4j import Log4jConfig
from marserve.frontend.logs.setup import DETAIL, reopen_log_files

DIRECTORIES = {"LOG_LOCATION": "/l", "METRICS_LOCATION": "/m"}


def read(tmp_path: Path, name: str, text: str) -> dict[str, Any] | Log4jConfig:
    path = tmp_path / name
    path.write_text(text)
    return read_log_config(path, DIRECTORIES)


XML = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration xmlns="http://logging.apache.org/log4j/2.0/config">
  <Loggers>
    <Root level="warn"/>
    <Logger name="org.pytorch.serve" level="DEBUG" additivity="false"/>
    <AsyncLogger name="ACCESS_LOG" level="off"/>
    <Logger name="MODEL_LOG"><level value="error"/></Logger>
    <Logger name="io.netty" level="error"/>
    <Logger name="org.pytorch.serve.wlm" level="error"/>
    <Logger name="TS_METRICS" level="loud"/>
    <Logger name="MODEL_METRICS"/>
  </Loggers>
</Configuration>
"""
LOG4J_2 = """
rootLogger.level = warn
logger.ts.name = org.pytorch.serve
logger.ts.level = DEBUG
logger.a.name = ACCESS_LOG
logger.a.level = off
logger.MODEL_LOG.level = error
logger.n.name = io.netty
logger.n.level = error
logger.w.name = org.pytorch.serve.wlm
logger.w.level = error
logger.t.name = TS_METRICS
logger.t.level = loud
"""
LOG4J_1 = """
log4j.rootLogger = WARN
log4j.logger.com.amazonaws.ml.ts = DEBUG
log4j.logger.ACCESS_LOG = OFF
log4j.category.MODEL_LOG = ERROR
log4j.logger.io.netty = ERROR
log4j.logger.org.pytorch.serve.wlm = ERROR
log4j.logger.TS_METRICS = loud
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [("l.xml", XML), ("l.properties", LOG4J_2), ("log4j.properties", LOG4J_1)],
)
def test_levels_of_log4j_are_used_and_the_rest_is_logged(
    name: str, text: str, tmp_path: Path
) -> None:
    config = read(tmp_path, name, text)
    assert isinstance(config, Log4jConfig)
    levels = {each.name: each.level for each in config.loggers if each.level is not None}
    assert levels == {
        "root": logging.WARNING,
        "marserve": logging.DEBUG,
        "ACCESS_LOG": OFF,
        "MODEL_LOG": logging.ERROR,
    }
    remarks = "\n".join(config.remarks)
    assert len(config.remarks) == 2
    for word in ("org.pytorch.serve.wlm", "TS_METRICS", "loud"):
        assert word in remarks


@pytest.mark.parametrize("name", ["l.json", "l.yaml", "l.YML"])
def test_a_dictionary_is_returned_for_dictconfig(name: str, tmp_path: Path) -> None:
    text = json.dumps(
        {"handlers": {"a": {"filename": "$LOG_LOCATION/a", "x": "${METRICS_LOCATION}$Y"}}}
    )
    assert read(tmp_path, name, text) == {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"a": {"filename": "/l/a", "x": "/m$Y"}},
    }


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("l.xml", "<a", "unclosed"),
        ("l.json", "{", "Expecting"),
        ("l.json", "[" * 100_000, "recursion|overflow"),
        ("l.yaml", "a: [", "while parsing"),
        ("l.yaml", "- a", "not a dictionary"),
        ("l.yaml", "a: !!timestamp 001-01-01", "NoneType"),
        ("l.yaml", "!!python/object:os.system {}", "constructor"),
        ("l.toml", "a=1", "does not end in"),
        ("l.properties", "a=\\ud800", "half"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name(
    name: str, text: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, name, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_log_config(tmp_path / "none.yaml", DIRECTORIES)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["l.yaml", "l.xml"])
def test_a_pipe_is_refused(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is no file"):
        read_log_config(tmp_path / name, DIRECTORIES)


def test_levels_are_applied_to_the_usual_files(tmp_path: Path) -> None:
    path = tmp_path / "log4j2.xml"
    path.write_text(XML)
    with configure_by_file(path, tmp_path / "l", tmp_path / "m"):
        logging.getLogger("marserve.api").debug("shown")
        logging.getLogger("MODEL_LOG").warning("hidden")
        logging.getLogger("ACCESS_LOG").critical("hidden")
    written = {each.name: each.read_text() for each in tmp_path.glob("?/*.log")}
    assert "marserve.api - shown" in written["ts_log.log"]
    assert "org.pytorch.serve.wlm" in written["ts_log.log"]
    assert written["model_log.log"] == written["access_log.log"] == ""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("loggers: {MODEL_LOG: {level: LOUD}}", "LOUD"),
        ("loggers: {MODEL_LOG: {handlers: [none]}}", "none"),
        ("loggers: 7", "Cannot use"),
        ("version: 2", "version"),
        ("handlers: {a: {class: no.such.Handler}}", "no"),
    ],
)
def test_a_dictionary_python_cannot_use_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    # Incremental or not, it must not reach for the handlers of the test's own loggers.
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        configure_by_file(path, tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("level", "word"),
    [
        (0, "debug"),
        (10, "debug"),
        (15, "info"),
        (30, "warn"),
        (40, "error"),
        (50, "fatal"),
        (60, "off"),
    ],
)
def test_levels_have_torchserves_words(level: int, word: str) -> None:
    assert level_word(level) == word


APPENDERS = """<Configuration><Appenders>
<Console name="c" target="SYSTEM_OUT"/><File name="f" fileName="{}"/>
</Appenders><Loggers>
<Logger name="org.pytorch.serve" level="info"><AppenderRef ref="f" level="info"/></Logger>
<Root level="info"><AppenderRef ref="c"/></Root>
</Loggers></Configuration>"""


def test_files_of_appenders_are_reopened_and_their_console_shows_no_details(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.log"
    (tmp_path / "log4j2.xml").write_text(APPENDERS.format(file))
    with configure_by_file(tmp_path / "log4j2.xml", tmp_path, tmp_path):
        file.rename(tmp_path / "moved.log")
        reopen_log_files()
        logging.getLogger("marserve").info("settings", extra=DETAIL)
        logging.getLogger("marserve").info("hello")
    text = file.read_text()
    assert "settings" in text
    assert "hello" in text
    printed = capsys.readouterr().out
    assert "hello" in printed
    assert "settings" not in printed
