"""Reads the file of ``--log-config``: a logging configuration of Python, or one of log4j.

A yaml or json file is a dictionary for `logging.config.dictConfig` and replaces the usual files.
Records of ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are finished lines, several in one
record, for a formatter ``%(message)s``. ``$LOG_LOCATION`` and ``$METRICS_LOCATION`` in the file are
the directories of the logs. It may use `marserve.frontend.logs.files.LogFile` with its ``path``,
and `marserve.frontend.logs.setup.LineFormatter`.

A log4j file (xml or properties, version 2 or 1) replaces them, too, if it has appenders
(`appenders`). Without appenders its levels apply to the usual files.
"""

import json
import logging
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import chain
from logging.config import dictConfig
from pathlib import Path
from string import Template
from typing import Any

from marserve.frontend.configuration.bounded_yaml import YamlTooLarge, load_yaml
from marserve.frontend.configuration.properties import ConfigError, parse_properties
from marserve.frontend.logs.appenders import make_handlers
from marserve.frontend.logs.levels import find_logger
from marserve.frontend.logs.log4j import Log4jConfig, Node, read_log4j
from marserve.frontend.logs.log4j_properties import tree_of_properties
from marserve.frontend.logs.setup import (
    Console,
    Forward,
    LoggerSetup,
    configure_logging,
    hide_details,
    restore_loggers,
    set_up_loggers,
    write_in_threads,
)
from marserve.frontend.regular_files import read_file

logger = logging.getLogger(__name__)

_UNREADABLE = (OSError, ValueError, RecursionError, ConfigError, ET.ParseError)


def configure_by_file(
    path: Path,
    log_dir: Path,
    metrics_dir: Path,
    *,
    as_json: bool = False,
    verbose: bool = False,
    properties: Mapping[str, str] | None = None,
) -> ExitStack:
    """Configure the logs by a file, as `configure_logging` does without one.

    ``properties`` are Java's, for lookups of log4j. ``as_json`` applies only where the file has no
    appenders, ``verbose`` only to a file of log4j.
    """
    variables = {"LOG_LOCATION": str(log_dir), "METRICS_LOCATION": str(metrics_dir)}
    config = read_log_config(path, variables, properties)
    if isinstance(config, dict):
        return _apply_dictionary(config, path, (log_dir, metrics_dir))
    if config.appenders:
        opened = _apply_log4j(config, verbose=verbose)
    else:
        opened = configure_logging(log_dir, metrics_dir, as_json=as_json, verbose=verbose)
        for each in config.loggers:
            if each.level is not None:
                find_logger(each.name).setLevel(each.level)
    for sentence in dict.fromkeys(config.remarks):
        logger.warning("%s: %s", path, sentence)
    return opened


def _apply_log4j(config: Log4jConfig, *, verbose: bool) -> ExitStack:
    with ExitStack() as opened:
        handlers = make_handlers(config.appenders, config.remarks, opened)
        for handler in chain.from_iterable(handlers.values()):
            if isinstance(handler, Console) and not verbose:
                hide_details(handler)
        of_root = {ref for each in config.loggers if each.name == "root" for ref in each.appenders}
        plan = [LoggerSetup("root", level=logging.ERROR)]  # as log4j without a level of the file
        for each in config.loggers:
            # An appender of the root logger, too, would get each record twice by additivity.
            shared = of_root if each.is_additive and each.name != "root" else ()
            attached: list[logging.Handler] = []
            for appender, level in each.appenders:
                targets = handlers.get(appender)
                if targets is None:
                    config.remarks.append(f"Logger {each.name}: there is no appender {appender!r}.")
                elif (appender, level) not in shared:
                    attached += [Forward(targets, level)] if level and targets else targets
            plan.append(LoggerSetup(each.name, attached, each.level, each.is_additive))
        set_up_loggers(plan, opened)
        return opened.pop_all()


def _apply_dictionary(
    dictionary: dict[str, Any], path: Path, directories: Iterable[Path]
) -> ExitStack:
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
    with ExitStack() as opened:
        restore_loggers(opened)
        try:
            dictConfig(dictionary)
        except (ValueError, TypeError, AttributeError, ImportError, KeyError) as error:
            reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
            raise ConfigError(f"Cannot use the log configuration {path}: {reason}") from error
        write_in_threads()
        return opened.pop_all()


def read_log_config(
    path: Path,
    directories: Mapping[str, str],
    properties: Mapping[str, str] | None = None,
    content: bytes | None = None,
) -> dict[str, Any] | Log4jConfig:
    """Read a file of log4j or a dictionary for logging, by the ending of its name.

    ``content`` is that of the file if it has been read. Raises ConfigError.
    """
    try:
        text = (read_file(path) if content is None else content).decode("utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml":
                return _dictionary(_load(Template(text).safe_substitute(directories)))
            case ".json":
                return _dictionary(json.loads(Template(text).safe_substitute(directories)))
            case ".xml":
                root = ET.fromstring(text)  # noqa: S314 - the operator's own file
                return read_log4j(Node.from_xml(root), properties or {})
            case ".properties":
                return read_log4j(tree_of_properties(parse_properties(text)), properties or {})
        raise ValueError("its name does not end in .yaml, .json, .xml or .properties")
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"Cannot use the log configuration {path}: {reason}") from error


def _load(text: str) -> Any:
    try:
        return load_yaml(text)
    except YamlTooLarge as error:
        raise ValueError(f"it {error}") from error
    except Exception as error:  # PyYAML raises many kinds
        raise ValueError(str(error)) from error


def _dictionary(parsed: Any) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise ValueError("it is not a dictionary")  # noqa: TRY004 - a value, not a type, is wrong
    # dictConfig disables the loggers of modules by default.
    return {"version": 1, "disable_existing_loggers": False, **parsed}
