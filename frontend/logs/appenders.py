"""log4j's appenders, with their layouts and some filters, as handlers of Python's logging.

What has no counterpart here is named in remarks.
"""

import logging
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from logging.handlers import SysLogHandler
from pathlib import Path

from marserve.frontend.logs.files import LogFile, Rollover
from marserve.frontend.logs.formats import JsonLayout, MetricLayout
from marserve.frontend.logs.levels import LEVELS
from marserve.frontend.logs.log4j import Node
from marserve.frontend.logs.patterns import PatternFormatter
from marserve.frontend.logs.setup import Console, standard_output

_PATTERN = "%d{ISO8601} [%-5p] %t %c - %m%n"
_ROLLING = ("rollingfile", "rollingrandomaccessfile")
_FILES = ("file", "randomaccessfile", *_ROLLING)
#: The kinds of appenders that have a counterpart, in lower case.
KINDS = ("async", "console", "null", "syslog", *_FILES)
_POLICIES = ("sizebasedtriggeringpolicy", "timebasedtriggeringpolicy", "defaultrolloverstrategy")
_SIZE = re.compile(r"([\d.]+)\s*([KMG]?)B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# log4j's default, which applies only where the names of old files are numbers.
_OLD_FILES = 7


def make_handlers(
    appenders: Mapping[str, Node], remarks: list[str], opened: ExitStack
) -> dict[str, list[logging.Handler]]:
    """Return the handlers of each appender by its name, which ``opened`` will close.

    ``remarks`` gets a sentence on everything that has no effect.
    """
    made: dict[str, list[logging.Handler]] = {}
    writers: dict[Path, str] = {}
    for name, node in appenders.items():
        if node.kind == "async":
            continue
        file = node.get("fileName")
        # A second one would continue in the old file after the first has rolled it over.
        first = writers.setdefault(Path(file).absolute(), name) if file else name
        if first != name:
            remarks.append(f"Appender {name}: {file} is written by appender {first}.")
            made[name] = made[first]
            continue
        notes: list[str] = []
        try:
            made[name] = _handlers(node, notes)
        except (ValueError, OverflowError) as error:
            remarks.append(f"Appender {name} is left out: {error}.")
            made[name] = []
        remarks += [f"Appender {name}: {note}." for note in notes]
        for handler in made[name]:
            opened.callback(handler.close)
    for name, node in appenders.items():
        if node.kind == "async":
            references = [each.get("ref") for each in node.children if each.kind == "appenderref"]
            made[name] = [handler for ref in references for handler in made.get(ref, ())]
    return made


def _handlers(node: Node, notes: list[str]) -> list[logging.Handler]:
    """Return the handler of an appender, if it has a counterpart."""
    if node.kind == "console":
        is_error = node.get("target").upper() == "SYSTEM_ERR"
        handler: logging.Handler = Console(sys.stderr if is_error else standard_output())
    elif node.kind in _FILES:
        handler = _log_file(node, notes)
    elif node.kind == "syslog":
        handler = _syslog(node)
    elif node.kind == "null":
        return [logging.NullHandler()]
    else:
        notes.append(f"{node.name} has no counterpart here; it is left out")
        return []
    _apply_children(handler, node, notes)
    return [handler]


def remarks_on(node: Node) -> list[str]:
    """Return what of an appender has no effect, without opening it."""
    notes: list[str] = []
    if node.kind in ("async", "null"):
        return notes
    _apply_children(logging.NullHandler(), node, notes)
    if node.kind in _ROLLING:
        try:
            _rollover(node, notes)
        except (ValueError, OverflowError) as error:
            notes.append(f"it is left out: {error}")
    return notes


def _apply_children(handler: logging.Handler, node: Node, notes: list[str]) -> None:
    """Set level, filters and layout of a handler."""
    handler.setFormatter(PatternFormatter(_PATTERN))
    for child in node.children:
        if child.kind == "thresholdfilter":
            handler.setLevel(LEVELS.get(child.get("level", "error").lower(), 0))
        elif child.kind == "regexfilter":
            handler.addFilter(_regex_filter(child, notes))
        elif child.kind.endswith("filter"):
            notes.append(f"{child.name} has no counterpart here; nothing is filtered")
        elif child.kind.endswith("layout"):
            handler.setFormatter(_formatter(child, notes))


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


def _formatter(layout: Node, notes: list[str]) -> logging.Formatter:
    match layout.kind:
        case "patternlayout":
            formatter = PatternFormatter(layout.get("pattern", "%m%n"))
            notes += formatter.remarks
            return formatter
        case "jsonpatternlayout":
            return MetricLayout()
        case "jsonlayout":
            pairs = [pair for pair in layout.children if pair.kind == "keyvaluepair"]
            more = {pair.get("key"): pair.get("value") for pair in pairs}
            return JsonLayout(more, includes_millis=layout.get("includeTimeMillis") == "true")
        case "jsontemplatelayout":
            notes.append("JsonTemplateLayout has the members of JsonLayout here, no template")
            return JsonLayout()
    notes.append(f"{layout.name} has no counterpart here; its lines are those of {_PATTERN!r}")
    return PatternFormatter(_PATTERN)


def _log_file(node: Node, notes: list[str]) -> logging.Handler:
    file = node.get("fileName")
    if not file:
        raise ValueError("it has no fileName")
    path, is_rolling = Path(file), node.kind in _ROLLING
    rollover = _rollover(node, notes) if is_rolling else Rollover("", None, 0, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    if node.get("append").lower() == "false":
        path.unlink(missing_ok=True)
    return LogFile(path, rollover)


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


def _syslog(node: Node) -> logging.Handler:
    host, port = node.get("host", "localhost"), int(node.get("port", "514"))
    facility = node.get("facility", "local0").lower()
    if facility not in SysLogHandler.facility_names:
        raise ValueError(f"{facility!r} is not a facility")
    if node.get("protocol", "UDP").upper() != "UDP":
        raise ValueError("syslog uses UDP only")
    try:
        return SysLogHandler((host, port), SysLogHandler.facility_names[facility])
    except (OSError, OverflowError) as error:
        raise ValueError(f"{host}:{port} cannot be reached ({error})") from error
