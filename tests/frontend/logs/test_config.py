import json
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.logs.config import configure_logging, read_log_config
from marserve.frontend.logs.levels import level_word
from marserve.frontend.logs.log4j import Translation

DIRECTORIES = {"LOG_LOCATION": "/l", "METRICS_LOCATION": "/m"}


def read(tmp_path: Path, name: str, text: str) -> dict[str, Any] | Translation:
    path = tmp_path / name
    path.write_text(text)
    return read_log_config(path, DIRECTORIES)


@pytest.mark.parametrize("name", ["l.json", "l.yaml", "l.YML"])
def test_a_dictionary_is_returned_for_dictconfig(name, tmp_path):
    text = json.dumps(
        {"handlers": {"a": {"filename": "$LOG_LOCATION/a", "x": "${METRICS_LOCATION}$Y"}}}
    )
    assert read(tmp_path, name, text) == {
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
def test_a_file_that_cannot_be_read_is_refused_by_name(name, text, reason, tmp_path):
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, name, text)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_log_config(tmp_path / "none.yaml", DIRECTORIES)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["l.yaml", "l.xml"])
def test_a_pipe_is_refused(name, tmp_path):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is no file"):
        read_log_config(tmp_path / name, DIRECTORIES)


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
def test_a_dictionary_python_cannot_use_is_refused(text, reason, tmp_path):
    path = tmp_path / "l.yaml"
    # Incremental or not, it must not reach for the handlers of the test's own loggers.
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        configure_logging(tmp_path, tmp_path, path)


def test_a_dictionary_may_name_the_root_logger_among_the_loggers(tmp_path):
    path = tmp_path / "l.yaml"
    path.write_text(
        "handlers: {f: {class: marserve.frontend.logs.files.LogFile, path: $LOG_LOCATION/a.log}}\n"
        "loggers: {'': {handlers: [f]}, MODEL_LOG: {handlers: [f], propagate: false}}\n"
    )
    threads = threading.active_count()
    with configure_logging(tmp_path / "l", tmp_path / "m", path):
        assert threading.active_count() == threads + 1
        logging.getLogger("marserve").warning("one")
        logging.getLogger("MODEL_LOG").warning("two")
    assert (tmp_path / "l" / "a.log").read_text() == "one\ntwo\n"


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
def test_levels_have_torchserves_words(level, word):
    assert level_word(level) == word
