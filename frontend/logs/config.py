"""Configures the logs: the usual ones (`setup`), or those of the file of ``--log-config``.

A yaml or json file is a dictionary for `logging.config.dictConfig` and replaces the usual files.
Records of ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are finished lines, several in one
record, for a formatter ``%(message)s``. ``$LOG_LOCATION`` and ``$METRICS_LOCATION`` in the file are
the directories of the logs. It may use `marserve.frontend.logs.files.LogFile` with its ``path``,
and `marserve.frontend.logs.setup.LineFormatter`.

A file of log4j 2 (xml or properties) is translated into such a dictionary (`log4j`). Without
appenders its levels apply to the usual files. A file of log4j 1 has no effect.
"""

import json
import logging
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from string import Template
from typing import Any

from marserve.frontend.configuration.bounded_yaml import YamlTooLarge, load_yaml
from marserve.frontend.configuration.properties import ConfigError, parse_properties
from marserve.frontend.logs.log4j import Translation, translate
from marserve.frontend.logs.log4j_tree import tree_of_properties, tree_of_xml
from marserve.frontend.logs.setup import apply_dictionary, usual_dictionary
from marserve.frontend.regular_files import read_file

logger = logging.getLogger(__name__)

_UNREADABLE = (OSError, ValueError, RecursionError, ConfigError, ET.ParseError)
_UNUSABLE = (ValueError, TypeError, AttributeError, ImportError, KeyError)
_LOG4J_1 = (
    "It is written for log4j 1, which TorchServe has not read since 0.5.1, and has no effect. "
    "Write it for log4j 2, or as a dictionary of Python's logging."
)


def configure_logging(
    log_dir: Path,
    metrics_dir: Path,
    file: Path | None = None,
    *,
    as_json: bool = False,
    verbose: bool = False,
    properties: Mapping[str, str] | None = None,
) -> ExitStack:
    """Open the logs, the usual ones or those of a file; closing the result undoes everything.

    ``properties`` are Java's, for lookups of log4j. ``as_json`` is the format of the usual files.
    A ``verbose`` console gets as much as the log file. Raises ConfigError if the file cannot be
    used, and OSError if a log cannot be opened.
    """
    dictionary = usual_dictionary(log_dir, metrics_dir, as_json=as_json)
    if file is None:
        return apply_dictionary(dictionary, verbose=verbose)
    variables = {"LOG_LOCATION": str(log_dir), "METRICS_LOCATION": str(metrics_dir)}
    config, remarks = read_log_config(file, variables, properties), list[str]()
    if isinstance(config, Translation):
        remarks = config.remarks
        if config.handlers:
            dictionary = config.dictionary
        else:
            for name, options in config.loggers.items():
                usual = dictionary["loggers"].setdefault(name, {})
                usual["level"] = options.get("level", usual.get("level"))
    else:
        dictionary = config
        for directory in (log_dir, metrics_dir):
            directory.mkdir(parents=True, exist_ok=True)
    try:
        opened = apply_dictionary(dictionary, verbose=verbose)
    except _UNUSABLE as error:
        reason = f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        raise ConfigError(f"Cannot use the log configuration {file}: {reason}") from error
    for sentence in dict.fromkeys(remarks):
        logger.warning("%s: %s", file, sentence)
    return opened


def read_log_config(
    path: Path,
    directories: Mapping[str, str],
    properties: Mapping[str, str] | None = None,
    content: bytes | None = None,
) -> dict[str, Any] | Translation:
    """Read a file of log4j or a dictionary for logging, by the ending of its name.

    ``content`` is that of the file if it has been read. Raises ConfigError.
    """
    try:
        text = (read_file(path) if content is None else content).decode("utf-8-sig")
        match path.suffix.lower():
            case ".yaml" | ".yml" | ".json" as ending:
                text = Template(text).safe_substitute(directories)
                parsed = json.loads(text) if ending == ".json" else _load(text)
                if isinstance(parsed, dict):
                    return parsed
                raise ValueError("it is not a dictionary")
            case ".xml":
                root = ET.fromstring(text)  # noqa: S314 - the operator's own file
                is_log4j_1 = root.tag.startswith("{http://jakarta.apache.org/log4j/}")
                tree = tree_of_xml(root)
            case ".properties":
                pairs = parse_properties(text)
                is_log4j_1 = any(key.startswith("log4j.") for key in pairs)
                tree = tree_of_properties(pairs)
            case _:
                raise ValueError("its name does not end in .yaml, .json, .xml or .properties")
        return Translation(remarks=[_LOG4J_1]) if is_log4j_1 else translate(tree, properties or {})
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
