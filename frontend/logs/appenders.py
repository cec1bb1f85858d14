"""log4j's appenders as handlers of Python's logging.

    Console                                a Console
    File, RollingFile, RandomAccessFile,   a LogFile, turned as policies and strategy say
    RollingRandomAccessFile
    Syslog                                 a SysLogHandler
    Async                                  the handlers that it stands before
    Null                                   a NullHandler

with the layouts PatternLayout, JsonLayout, JSONPatternLayout and JsonTemplateLayout, and the filter
ThresholdFilter. What is none of these is mentioned with the name of its appender.
"""

import logging
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from logging.handlers import SysLogHandler
from pathlib import Path

from marserve.frontend.logs.files import LogFile, Rollover
from marserve.frontend.logs.formats import JsonLayout, MetricLayout
from marserve.frontend.logs.levels import LEVELS
from marserve.frontend.logs.log4j import attribute, tag
from marserve.frontend.logs.patterns import PatternFormatter
from marserve.frontend.logs.setup import Console, standard_output

_PATTERN = "%d{ISO8601} [%-5p] %t %c - %m%n"
_ROLLING = ("rollingfile", "rollingrandomaccessfile")
_FILES = ("file", "randomaccessfile", *_ROLLING)
#: Of log4j's kinds, in small letters, those that have a counterpart here.
KINDS = ("async", "console", "null", "syslog", *_FILES)
_FOLLOWED = ("sizebasedtriggeringpolicy", "timebasedtriggeringpolicy", "defaultrolloverstrategy")
_SIZE = re.compile(r"([\d.]+)\s*([KMG]?)B?", re.IGNORECASE)
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Of a strategy that says nothing; counts only where the names of old files have numbers.
_OLD_FILES = 7


def make_handlers(
    appenders: Mapping[str, ET.Element], remarks: list[str], opened: ExitStack
) -> dict[str, list[logging.Handler]]:
    """The handlers of each appender, by its name, which ``opened`` will close.

    What could not be followed is added to ``remarks``.

    Raises:
        OSError: A file cannot be opened.
    """
    made: dict[str, list[logging.Handler]] = {}
    writers: dict[Path, str] = {}
    for name, element in appenders.items():
        if tag(element) == "async":
            continue
        file = attribute(element, "fileName")
        # Of two that write a file, one would go on in the old file that the other has turned.
        first = writers.setdefault(Path(file).absolute(), name) if file else name
        if first != name:
            remarks.append(f"Appender {name}: {file} is written as appender {first} says.")
            made[name] = made[first]
            continue
        notes: list[str] = []
        try:
            made[name] = _handlers(element, notes)
        except ValueError as error:
            remarks.append(f"Appender {name} is left out: {error}.")
            made[name] = []
        remarks += [f"Appender {name}: {note}." for note in notes]
        for handler in made[name]:
            opened.callback(handler.close)
    for name, element in appenders.items():
        if tag(element) == "async":
            references = [attribute(ref, "ref") for ref in element if tag(ref) == "appenderref"]
            made[name] = [handler for ref in references for handler in made.get(ref, ())]
    return made


def _handlers(element: ET.Element, notes: list[str]) -> list[logging.Handler]:
    """The handler that does the same, if there is one.

    Raises:
        ValueError: A value makes no sense.
    """
    kind = tag(element)
    if kind == "console":
        is_error = attribute(element, "target").upper() == "SYSTEM_ERR"
        handler: logging.Handler = Console(sys.stderr if is_error else standard_output())
    elif kind in _FILES:
        handler = _log_file(element, notes)
    elif kind == "syslog":
        handler = _syslog(element)
    elif kind == "null":
        return [logging.NullHandler()]
    else:
        notes.append(f"{element.tag} has no counterpart here; it is left out")
        return []
    handler.setFormatter(PatternFormatter(_PATTERN))
    for child in _children(element, "filters"):
        kind = tag(child)
        if kind == "thresholdfilter":
            handler.setLevel(LEVELS.get(attribute(child, "level", "error").lower(), 0))
        elif kind.endswith("filter"):
            notes.append(f"{child.tag} has no counterpart here; nothing is filtered")
        elif kind.endswith("layout"):
            handler.setFormatter(_formatter(child, notes))
    return [handler]


def _formatter(layout: ET.Element, notes: list[str]) -> logging.Formatter:
    match tag(layout):
        case "patternlayout":
            formatter = PatternFormatter(attribute(layout, "pattern", "%m%n"))
            notes += formatter.remarks
            return formatter
        case "jsonpatternlayout":
            return MetricLayout()
        case "jsonlayout":
            pairs = [pair for pair in layout if tag(pair) == "keyvaluepair"]
            more = {attribute(pair, "key"): attribute(pair, "value") for pair in pairs}
            millis = attribute(layout, "includeTimeMillis") == "true"
            return JsonLayout(more, includes_millis=millis)
        case "jsontemplatelayout":
            notes.append("JsonTemplateLayout has JsonLayout's members here, no template's")
            return JsonLayout()
    notes.append(f"{layout.tag} has no counterpart here; its lines are those of {_PATTERN!r}")
    return PatternFormatter(_PATTERN)


def _log_file(element: ET.Element, notes: list[str]) -> logging.Handler:
    file = attribute(element, "fileName")
    if not file:
        raise ValueError("it names no file")
    path, is_rolling = Path(file), tag(element) in _ROLLING
    rollover = _rollover(element, notes) if is_rolling else Rollover("", None, 0, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    if attribute(element, "append").lower() == "false":
        path.unlink(missing_ok=True)
    return LogFile(path, rollover)


def _rollover(element: ET.Element, notes: list[str]) -> Rollover:
    pattern = attribute(element, "filePattern")
    if not pattern:
        raise ValueError("it has no filePattern")
    if re.search(r"\.(zip|bz2|deflate|pack200|xz|zst)$", pattern):
        notes.append(f"old files are compressed by gzip, for {pattern!r}")
        pattern = pattern.rpartition(".")[0] + ".gz"
    if not re.search(r"%d|%\d*i", pattern):
        stem, dot, ending = pattern.partition(".log")
        pattern = f"{stem}.%i{dot}{ending}"
        notes.append(f"filePattern has no %d and no %i, so {pattern!r} counts")
    parts = {tag(child): child for child in _children(element, "policies")}
    size, time = parts.get("sizebasedtriggeringpolicy"), parts.get("timebasedtriggeringpolicy")
    for kind, child in parts.items():
        if kind.endswith(("policy", "strategy")) and kind not in _FOLLOWED:
            notes.append(f"{child.tag} has no counterpart here")
    return Rollover(
        pattern,
        None if size is None else _bytes(attribute(size, "size", "10 MB")),
        0 if time is None else max(1, int(attribute(time, "interval", "1"))),
        _old_files(pattern, parts.get("defaultrolloverstrategy"), notes),
    )


def _old_files(pattern: str, strategy: ET.Element | None, notes: list[str]) -> int | None:
    """How many old files are kept; None for all."""
    if strategy is not None:
        if any(tag(child) == "delete" for child in strategy):
            notes.append("Delete has no counterpart here; max has")
        if attribute(strategy, "fileIndex") == "nomax":
            return None
        if attribute(strategy, "max"):
            return int(attribute(strategy, "max"))
    return _OLD_FILES if re.search(r"%\d*i", pattern) and "%d{" not in pattern else None


def _children(element: ET.Element, group: str) -> Iterable[ET.Element]:
    """What is inside an element, and inside the group of that name in it."""
    for child in element:
        if tag(child) == group:
            yield from child
        else:
            yield child


def _bytes(size: str) -> int:
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f"{size!r} is no size of a file")
    return max(1, int(float(match[1]) * _FACTORS[match[2].upper()]))


def _syslog(element: ET.Element) -> logging.Handler:
    host, port = attribute(element, "host", "localhost"), int(attribute(element, "port", "514"))
    facility = attribute(element, "facility", "local0").lower()
    if facility not in SysLogHandler.facility_names:
        raise ValueError(f"there is no facility {facility!r}")
    if attribute(element, "protocol", "UDP").upper() != "UDP":
        raise ValueError("syslog goes by UDP only")
    try:
        return SysLogHandler((host, port), SysLogHandler.facility_names[facility])
    except (OSError, OverflowError) as error:
        raise ValueError(f"{host}:{port} cannot be reached ({error})") from error
