"""What ``--log-config`` names: a logging configuration of Python's, or one of log4j.

A yaml or json file is a dictionary for `logging.config.dictConfig` and decides everything. Loggers
are ``marserve``, ``MODEL_LOG``, ``ACCESS_LOG``, ``TS_METRICS``, ``MODEL_METRICS``; records of the
last three are finished lines, several in one record, for a formatter ``%(message)s``.
``$LOG_LOCATION`` and ``$METRICS_LOCATION`` in the file stand for the directories of the logs. What
we use can be named there: `marserve.frontend.logs.files.LogFile` with its ``path``, and
`marserve.frontend.logs.setup.LineFormatter`.

Of a log4j file (xml or properties, version 2 or 1) the levels of the loggers are taken over, for
these are what most such files change; its appenders, layouts and filters are Java's business.
"""

import json
import logging
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from logging.config import dictConfig
from pathlib import Path
from string import Template
from typing import Any

import yaml

from marserve.frontend.configuration.properties import ConfigError, parse_properties
from marserve.frontend.logs.levels import LEVELS
from marserve.frontend.logs.setup import configure_logging, remember_loggers, set_level

logger = logging.getLogger(__name__)

_OWN_LOGGERS = ("MODEL_LOG", "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
_SERVER_LOGGERS = ("org.pytorch.serve", "com.amazonaws.ml.ts")
_UNREADABLE = (
    OSError,
    ValueError,
    RecursionError,
    ConfigError,
    yaml.YAMLError,
    ET.ParseError,
)


@dataclass(frozen=True)
class LogConfig:
    """What a file asks for.

    Attributes:
        dictionary: For `logging.config.dictConfig`; None for a log4j file.
        levels: Of loggers, by our names; the root logger is ``root``.
        ignored: Sentences on what was not taken over.
    """

    dictionary: dict[str, Any] | None = None
    levels: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


def configure_as_told(
    path: Path,
    log_dir: Path,
    metrics_dir: Path,
    *,
    as_json: bool = False,
    asynchronous: bool = False,
    verbose: bool = False,
) -> ExitStack:
    """`configure_logging`, as a file wants it.

    Args:
        path: See `read_log_config`.
        log_dir: Directory of the logs.
        metrics_dir: Directory of the metrics logs.
        as_json: See `configure_logging`; so are ``asynchronous`` and ``verbose``.
        asynchronous: A dictionary decides about all three itself.
        verbose: The third.

    Raises:
        ConfigError: The file cannot be used.
        OSError: A log file cannot be opened.
    """
    places = {"LOG_LOCATION": str(log_dir), "METRICS_LOCATION": str(metrics_dir)}
    asked = read_log_config(path, places)
    if asked.dictionary is not None:
        return _apply(asked.dictionary, path, (log_dir, metrics_dir))
    opened = configure_logging(
        log_dir, metrics_dir, as_json=as_json, asynchronous=asynchronous, verbose=verbose
    )
    for name, level in asked.levels.items():
        set_level(name, level)
    for sentence in asked.ignored:
        logger.warning("%s", sentence)
    return opened


def _apply(dictionary: dict[str, Any], path: Path, directories: Iterable[Path]) -> ExitStack:
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        remember_loggers(opened)
        try:
            dictConfig(dictionary)
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
            reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise ConfigError(f"Cannot use the log configuration {path}: {reason}") from error
        return opened.pop_all()


def read_log_config(path: Path, directories: Mapping[str, str]) -> LogConfig:
    """Read a file.

    Args:
        path: Its ending says what it is: yaml, yml, json, xml, properties.
        directories: Values of ``LOG_LOCATION`` and ``METRICS_LOCATION``.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml":
                return LogConfig(_dictionary(yaml.safe_load(_expand(text, directories))))
            case ".json":
                return LogConfig(_dictionary(json.loads(_expand(text, directories))))
            case ".xml":
                return _of_levels(path, _levels_of_xml(text))
            case ".properties":
                return _of_levels(path, _levels_of_properties(parse_properties(text)))
        raise ValueError("its name ends in none of .yaml, .json, .xml, .properties")
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"Cannot use the log configuration {path}: {reason}") from error


def _expand(text: str, directories: Mapping[str, str]) -> str:
    return Template(text).safe_substitute(directories)


def _dictionary(parsed: Any) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise ValueError("it is no dictionary")  # noqa: TRY004 - a value, not a type, is wrong
    # A server whose loggers are silently switched off is nobody's wish.
    return {"version": 1, "disable_existing_loggers": False, **parsed}


def _of_levels(path: Path, found: Iterator[tuple[str, str]]) -> LogConfig:
    levels: dict[str, int] = {}
    ignored = [f"Of {path} the levels are taken over, not its appenders, layouts and filters."]
    for name, word in found:
        ours, level = _our_name(name), LEVELS.get(word.strip().lower())
        if ours is None or level is None:
            ignored.append(f"Logger {name or 'root'} with level {word!r} in {path} is ignored.")
        else:
            levels[ours] = level
    return LogConfig(levels=levels, ignored=tuple(ignored))


def _our_name(name: str) -> str | None:
    if name in ("", "root"):
        return "root"
    if name in _OWN_LOGGERS:
        return name
    return "marserve" if name in _SERVER_LOGGERS else None


def _levels_of_xml(text: str) -> Iterator[tuple[str, str]]:
    """Yields loggers and level words of log4j 2, and of log4j 1's ``<level value=…>``."""
    for element in ET.fromstring(text).iter():  # noqa: S314 - the operator's own file
        kind = element.tag.rpartition("}")[2].lower()
        if kind not in ("logger", "asynclogger", "root", "asyncroot", "category"):
            continue
        name = "" if kind.endswith("root") else element.get("name", "")
        nested = element.find("{*}level")
        level = element.get("level") or (nested.get("value") if nested is not None else None)
        if level:
            yield name, level


def _levels_of_properties(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields loggers and level words of log4j 2, and of log4j 1's ``log4j.logger.NAME=LEVEL``."""
    for key, value in properties.items():
        word = value.partition(",")[0]
        if key in ("rootLogger.level", "log4j.rootLogger", "rootLogger"):
            yield "", word
        elif match := re.fullmatch(r"logger\.([^.]+)\.level", key):
            yield properties.get(f"logger.{match[1]}.name", match[1]), word
        elif key.startswith(("log4j.logger.", "log4j.category.")) and word:
            yield key.split(".", 2)[2], word
