"""What ``--log-config`` names: a logging configuration of Python's, or one of log4j.

A yaml or json file is a dictionary for `logging.config.dictConfig` and decides everything. Records
of ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are finished lines, several in one record,
for a formatter ``%(message)s``. ``$LOG_LOCATION`` and ``$METRICS_LOCATION`` in the file stand for
the directories of the logs. It may name `marserve.frontend.logs.files.LogFile` with its ``path``,
and `marserve.frontend.logs.setup.LineFormatter`.

A log4j file (xml or properties, version 2 or 1) decides everything, too, if it has appenders, which
become handlers (`appenders`). Without appenders its levels count, for the usual files. What is not
taken over is logged, once.
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
from marserve.frontend.logs.levels import set_level
from marserve.frontend.logs.log4j import Log4jConfig, read_log4j
from marserve.frontend.logs.log4j_properties import tree_of_properties
from marserve.frontend.logs.setup import (
    Console,
    Forward,
    Writer,
    attach,
    configure_logging,
    hide_details,
    remember_loggers,
)

logger = logging.getLogger(__name__)

_UNREADABLE = (OSError, ValueError, RecursionError, ConfigError, ET.ParseError)


def configure_by_file(
    path: Path,
    log_dir: Path,
    metrics_dir: Path,
    *,
    as_json: bool = False,
    asynchronous: bool = False,
    verbose: bool = False,
    properties: Mapping[str, str] | None = None,
) -> ExitStack:
    """`configure_logging` by a file; ``properties`` are Java's, for lookups of log4j.

    A dictionary decides itself about ``as_json``, ``asynchronous`` and ``verbose``, appenders about
    the first.

    Raises:
        ConfigError: The file cannot be used.
        OSError: A log file cannot be opened.
    """
    places = {"LOG_LOCATION": str(log_dir), "METRICS_LOCATION": str(metrics_dir)}
    config = read_log_config(path, places, properties)
    if isinstance(config, dict):
        return _apply_dictionary(config, path, (log_dir, metrics_dir))
    if config.appenders:
        opened = _apply_log4j(config, asynchronous=asynchronous, verbose=verbose)
    else:
        opened = configure_logging(
            log_dir, metrics_dir, as_json=as_json, asynchronous=asynchronous, verbose=verbose
        )
        for configured in config.loggers:
            if configured.level is not None:
                set_level(configured.name, configured.level)
    for sentence in dict.fromkeys(config.remarks):
        logger.warning("%s: %s", path, sentence)
    return opened


def _apply_log4j(config: Log4jConfig, *, asynchronous: bool, verbose: bool) -> ExitStack:
    with ExitStack() as opened:
        handlers = make_handlers(config.appenders, config.remarks, opened)
        for handler in chain.from_iterable(handlers.values()):
            if isinstance(handler, Console) and not verbose:
                hide_details(handler)
        writer = Writer(opened) if asynchronous else None
        loggers = config.loggers
        remember_loggers(opened, (configured.name for configured in loggers))
        set_level("root", logging.ERROR)  # as log4j, where the file says nothing
        of_root = {ref for each in loggers if each.name == "root" for ref in each.appenders}
        for configured in loggers:
            name, is_additive = configured.name, configured.is_additive
            # Where an appender is the root's, too, additivity would write each record twice.
            shared = of_root if is_additive and name != "root" else ()
            references = [ref for ref in configured.appenders if ref not in shared]
            attached = _referenced(name, references, handlers, config.remarks)
            if attached and writer is not None:
                attached = [writer.before(attached)]
            attach(name, attached, configured.level, propagate=is_additive)
        return opened.pop_all()


def _referenced(
    name: str,
    references: Iterable[tuple[str, int]],
    handlers: Mapping[str, list[logging.Handler]],
    remarks: list[str],
) -> list[logging.Handler]:
    """The handlers of a logger's appenders, each for records from a level on."""
    found: list[logging.Handler] = []
    for appender, level in references:
        if appender not in handlers:
            remarks.append(f"Logger {name}: there is no appender {appender!r}.")
        targets = handlers.get(appender, [])
        found += [Forward(targets, level)] if level and targets else targets
    return found


def _apply_dictionary(
    dictionary: dict[str, Any], path: Path, directories: Iterable[Path]
) -> ExitStack:
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


def read_log_config(
    path: Path,
    directories: Mapping[str, str],
    properties: Mapping[str, str] | None = None,
    content: bytes | None = None,
) -> dict[str, Any] | Log4jConfig:
    """Read a file of logging's dictionary or of log4j, as the ending of its name says.

    ``content`` is that of the file, where it has been read.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        text = (path.read_bytes() if content is None else content).decode("utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml":
                return _dictionary(_load(Template(text).safe_substitute(directories)))
            case ".json":
                return _dictionary(json.loads(Template(text).safe_substitute(directories)))
            case ".xml":
                root = ET.fromstring(text)  # noqa: S314 - the operator's own file
                return read_log4j(root, properties or {})
            case ".properties":
                return read_log4j(tree_of_properties(parse_properties(text)), properties or {})
        raise ValueError("its name ends in none of .yaml, .json, .xml, .properties")
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"Cannot use the log configuration {path}: {reason}") from error


def _load(text: str) -> Any:
    try:
        return load_yaml(text)
    except YamlTooLarge as error:
        raise ValueError(f"it {error}") from error
    except Exception as error:  # the parser has many corners
        raise ValueError(str(error)) from error


def _dictionary(parsed: Any) -> dict[str, Any]:
    if not isinstance(parsed, dict):
        raise ValueError("it is no dictionary")  # noqa: TRY004 - a value, not a type, is wrong
    # Nobody wants a server whose loggers are silently switched off.
    return {"version": 1, "disable_existing_loggers": False, **parsed}
