"""Translates a configuration of log4j 2 into a dictionary for `logging.config.dictConfig`.

An appender becomes a handler, its layout a formatter. Remarks name the parts without a counterpart.
Nothing is opened.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging.handlers import SysLogHandler
from pathlib import Path
from typing import Any

from marserve.frontend.logs.files import LogFile, Rollover
from marserve.frontend.logs.formats import JsonLayout, MetricLayout
from marserve.frontend.logs.levels import LEVELS, OF_FILES, SERVER
from marserve.frontend.logs.log4j_tree import Node, resolve_lookups
from marserve.frontend.logs.patterns import PatternFormatter
from marserve.frontend.logs.setup import Console

# TorchServe's own file sets levels of these; they are not part of this server.
_JAVA_LIBRARIES = re.compile(
    r"(io\.(netty|grpc|prometheus)|org\.(apache|eclipse)|com\.google)(\..*)?"
)
_LOGGERS = ("logger", "asynclogger", "root", "asyncroot", "category")
_PATTERN = "%d{ISO8601} [%-5p] %t %c - %m%n"
_ROLLING = ("rollingfile", "rollingrandomaccessfile")
_FILES = ("file", "randomaccessfile", *_ROLLING)
_POLICIES = ("sizebasedtriggeringpolicy", "timebasedtriggeringpolicy", "defaultrolloverstrategy")
_SIZE = re.compile(r"([\d.]+)\s*([KMG]?)B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# log4j's default, which applies only where the names of old files are numbers.
_OLD_FILES = 7

#: A handler, formatter or logger, as `dictConfig` takes it.
_Options = dict[str, Any]


@dataclass
class Translation:
    """The handlers, formatters and loggers of a file; ``root`` is among the loggers.

    A file without appenders has levels only, for the usual files. ``remarks`` are sentences on what
    has no effect.
    """

    handlers: dict[str, _Options] = field(default_factory=dict)
    formatters: dict[str, _Options] = field(default_factory=dict)
    loggers: dict[str, _Options] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    @property
    def dictionary(self) -> dict[str, Any]:
        """The dictionary for `dictConfig`."""
        return {
            "formatters": self.formatters,
            "handlers": self.handlers,
            "loggers": self.loggers,
        }


def translate(root: Node, properties: Mapping[str, str]) -> Translation:
    """Translate a ``Configuration`` of log4j; ``properties`` are Java's, for ``${sys:…}``."""
    made = Translation()
    if root.get("monitorInterval", "0") != "0":
        made.remarks.append("monitorInterval has no effect: the file is read once.")
    resolve_lookups(root, properties, made.remarks)
    nodes = [*root.walk()]
    appenders = [each for node in nodes if node.kind == "appenders" for each in node.children]
    handlers_of = _add_handlers(appenders, made)
    passed = defaultdict[str, set[int]](set)  # the levels of a handler's references
    for node in nodes:
        if node.kind in _LOGGERS:
            _add_logger(node, handlers_of, passed, made)
    of_root = made.loggers.get("root", {}).get("handlers", ())
    for name, each in made.loggers.items():
        if name != "root" and each["propagate"]:  # each record would be written twice
            each["handlers"] = [handler for handler in each["handlers"] if handler not in of_root]
    # No file is opened that nothing is written to.
    made.handlers = {name: made.handlers[name] for name in passed}
    for name, levels in passed.items():
        if len(levels) > 1:
            made.remarks.append(
                f"Appender {name}: its references have several levels, of which the lowest applies."
            )
        made.handlers[name]["level"] = max(made.handlers[name].get("level", 0), min(levels))
    if made.handlers:  # else its levels are for the usual files
        made.loggers.setdefault("root", {}).setdefault("level", logging.ERROR)  # log4j's default
    return made


def _add_logger(
    node: Node,
    handlers_of: Mapping[str, list[str]],
    passed: Mapping[str, set[int]],
    made: Translation,
) -> None:
    name = "root" if node.kind.endswith("root") else node.get("name") or "root"
    if _JAVA_LIBRARIES.fullmatch(name):
        return
    level_name = node.get("level")
    ours, level = _our_name(name), LEVELS.get(level_name.strip().lower())
    if ours is None or (level_name and level is None):
        what = f"with level {level_name!r}" if level_name else "and its appenders"
        made.remarks.append(f"Logger {name} {what} is ignored.")
        return
    logger = made.loggers.setdefault(ours, {"handlers": []})
    logger["propagate"] = node.get("additivity", "true").strip().lower() != "false"
    if level is not None:
        logger["level"] = level
    for reference in node.children:
        if reference.kind in ("appenderref", "appender-ref"):
            appender = reference.get("ref")
            if appender not in handlers_of:
                made.remarks.append(f"Logger {ours}: there is no appender {appender!r}.")
            for handler in handlers_of.get(appender, ()):
                logger["handlers"].append(handler)
                passed[handler].add(LEVELS.get(reference.get("level").lower(), 0))


def _our_name(name: str) -> str | None:
    if name in OF_FILES or name.startswith(f"{SERVER}."):
        return name
    return SERVER if name in ("org.pytorch.serve", "com.amazonaws.ml.ts") else None


def _add_handlers(appenders: list[Node], made: Translation) -> dict[str, list[str]]:
    """Add the handlers of appenders; return their names by appender."""
    handlers_of: dict[str, list[str]] = {}
    writers: dict[Path, str] = {}
    for node in appenders:
        if node.kind == "async":
            continue
        name, file, notes = node.get("name"), node.get("fileName"), list[str]()
        # A second one would continue in the old file after the first has rolled it over.
        first = writers.setdefault(Path(file).absolute(), name) if file else name
        if first != name:
            made.remarks.append(f"Appender {name}: {file} is written by appender {first}.")
            handlers_of[name] = handlers_of[first]
            continue
        try:
            made.handlers[name] = _handler(node, name, notes, made)
            handlers_of[name] = [name]
        except (ValueError, OverflowError) as error:
            made.remarks.append(f"Appender {name} is left out: {error}.")
            handlers_of[name] = []
        made.remarks += [f"Appender {name}: {note}." for note in notes]
    for node in appenders:
        if node.kind == "async":
            names = [each.get("ref") for each in node.children if each.kind == "appenderref"]
            targets = [handler for name in names for handler in handlers_of.get(name, ())]
            handlers_of[node.get("name")] = targets
    return handlers_of


def _handler(node: Node, name: str, notes: list[str], made: Translation) -> _Options:
    """Return the handler of an appender; raises ValueError if it has no counterpart."""
    handler: _Options
    if node.kind == "console":
        is_error = node.get("target").upper() == "SYSTEM_ERR"
        handler = {"()": Console, "stream": "ext://sys.stderr" if is_error else None}
    elif node.kind in _FILES:
        handler = _log_file(node, notes)
    elif node.kind == "syslog":
        handler = _syslog(node, name, made.remarks)
    elif node.kind == "null":
        return {"class": "logging.NullHandler"}
    else:
        raise ValueError(f"{node.name} has no counterpart; console, files and syslog have one")
    handler |= {"formatter": name, "filters": []}
    made.formatters[name] = {"()": PatternFormatter, "pattern": _PATTERN}
    for child in node.children:
        if child.kind == "thresholdfilter":
            handler["level"] = LEVELS.get(child.get("level", "error").lower(), 0)
        elif child.kind == "regexfilter":
            handler["filters"].append(_regex_filter(child, notes))
        elif child.kind.endswith("filter"):
            notes.append(f"{child.name} has no counterpart here; nothing is filtered")
        elif child.kind.endswith("layout"):
            made.formatters[name] = _formatter(child, notes)
    return handler


def _regex_filter(node: Node, notes: list[str]) -> Callable[[logging.LogRecord], bool]:
    """Return a filter of whole messages; ACCEPT is NEUTRAL, so that other filters apply, too."""
    try:
        pattern = re.compile(node.attributes["regex"])
    except (KeyError, re.error) as error:
        notes.append(f"RegexFilter has no regex that can be used ({error}); nothing is filtered")
        return lambda _record: True
    on_match = node.get("onMatch", "NEUTRAL").upper() != "DENY"
    on_mismatch = node.get("onMismatch", "DENY").upper() != "DENY"
    return lambda record: on_match if pattern.fullmatch(record.getMessage()) else on_mismatch


def _formatter(layout: Node, notes: list[str]) -> _Options:
    match layout.kind:
        case "patternlayout":
            pattern = layout.get("pattern", "%m%n")
            notes += PatternFormatter(pattern).remarks
            return {"()": PatternFormatter, "pattern": pattern}
        case "jsonpatternlayout":
            return {"()": MetricLayout}
        case "jsonlayout":
            pairs = [pair for pair in layout.children if pair.kind == "keyvaluepair"]
            more = {pair.get("key"): pair.get("value") for pair in pairs}
            includes_millis = layout.get("includeTimeMillis") == "true"
            return {"()": JsonLayout, "more": more, "includes_millis": includes_millis}
        case "jsontemplatelayout":
            notes.append("JsonTemplateLayout has the members of JsonLayout here, no template")
            return {"()": JsonLayout}
    notes.append(f"{layout.name} has no counterpart here; its lines are those of {_PATTERN!r}")
    return {"()": PatternFormatter, "pattern": _PATTERN}


def _log_file(node: Node, notes: list[str]) -> _Options:
    if not node.get("fileName"):
        raise ValueError("it has no fileName")
    is_rolling = node.kind in _ROLLING
    return {
        "()": LogFile,
        "path": node.get("fileName"),
        "rollover": _rollover(node, notes) if is_rolling else Rollover("", None, 0, None),
        "append": node.get("append").lower() != "false",
    }


def _rollover(node: Node, notes: list[str]) -> Rollover:
    pattern = node.get("filePattern")
    if not pattern:
        raise ValueError("it has no filePattern")
    if re.search(r"\.(zip|bz2|deflate|pack200|xz|zst)$", pattern):
        notes.append(f"old files are compressed by gzip instead of {pattern!r}")
        pattern = pattern.rpartition(".")[0] + ".gz"
    if not re.search(r"%d|%\d*i", pattern):
        stem, dot, ending = pattern.partition(".log")
        pattern = f"{stem}.%i{dot}{ending}"
        notes.append(f"filePattern has no %d and no %i, so old files are named by {pattern!r}")
    parts = {child.kind: child for child in node.children}
    size, time, strategy = (parts.pop(kind, None) for kind in _POLICIES)
    others = (each for each in parts.values() if each.kind.endswith(("policy", "strategy")))
    notes += [f"{each.name} has no counterpart here" for each in others]
    return Rollover(
        pattern,
        None if size is None else _bytes(size.get("size", "10 MB")),
        0 if time is None else max(1, int(time.get("interval", "1"))),
        _old_files(pattern, strategy, notes),
    )


def _old_files(pattern: str, strategy: Node | None, notes: list[str]) -> int | None:
    """Return how many old files are kept; None for all."""
    if strategy is not None:
        if any(child.kind == "delete" for child in strategy.children):
            notes.append("Delete has no counterpart here; max has")
        if strategy.get("fileIndex") == "nomax":
            return None
        if strategy.get("max"):
            return int(strategy.get("max"))
    return _OLD_FILES if re.search(r"%\d*i", pattern) and "%d{" not in pattern else None


def _bytes(size: str) -> int:
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"{size!r} is not the size of a file")
    return max(1, int(float(match[1]) * _FACTORS[match[2].upper()]))


def _syslog(node: Node, name: str, remarks: list[str]) -> _Options:
    facility = node.get("facility", "local0").lower()
    if facility not in SysLogHandler.facility_names:
        raise ValueError(f"{facility!r} is not a facility")
    if node.get("protocol", "UDP").upper() != "UDP":
        raise ValueError("syslog uses UDP only")
    address = (node.get("host", "localhost"), int(node.get("port", "514")))

    def open_syslog() -> logging.Handler:
        try:
            return SysLogHandler(address, SysLogHandler.facility_names[facility])
        except (OSError, OverflowError) as error:
            at = "{}:{}".format(*address)
            remarks.append(f"Appender {name} is left out: {at} cannot be reached ({error}).")
            return logging.NullHandler()

    return {"()": open_syslog}
