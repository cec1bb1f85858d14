"""A configuration of log4j (version 2 or 1, xml or properties), read into one shape.

That is the tree of log4j 2's xml (`log4j_properties` makes it of properties) with lookups resolved:
``${env:LOG_LOCATION:-logs}``, ``${sys:name}``, ``${name}`` of the file's properties.
"""

import datetime as dt
import os
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.logs.dates import date_format
from marserve.frontend.logs.levels import LEVELS

_OUR_LOGGERS = ("MODEL_LOG", "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
_SERVER_LOGGERS = ("org.pytorch.serve", "com.amazonaws.ml.ts")
# What TorchServe's own file quietens; those are not part of this server.
_JAVA_LIBRARIES = re.compile(
    r"(io\.(netty|grpc|prometheus)|org\.(apache|eclipse)|com\.google)(\..*)?"
)
_LOGGERS = ("logger", "asynclogger", "root", "asyncroot", "category")
_LOOKUP = re.compile(r"\$\$?\{([^${}]*)\}")
_MAX_LOOKUP_DEPTH = 10
# Lookups that lead to one another make a value grow without end.
_MAX_VALUE_LENGTH = 100_000
_SYSTEM_PROPERTIES: dict[str, Callable[[], str | None]] = {
    "user.dir": lambda: str(Path.cwd()),
    "user.home": lambda: str(Path.home()),
    "java.io.tmpdir": lambda: os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - Java's own default
}


@dataclass(frozen=True)
class Log4jLogger:
    """A logger, by our name; ``root`` for the root logger."""

    name: str
    level: int | None  # None where its parent's counts
    is_additive: bool  # whether its parents' appenders get its records, too
    appenders: tuple[tuple[str, int], ...]  # names, each with the least level it gets


@dataclass
class Log4jConfig:
    """What a file says; ``remarks`` are sentences on what was not taken over."""

    appenders: dict[str, ET.Element] = field(default_factory=dict)  # by name
    loggers: list[Log4jLogger] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def read_log4j(root: ET.Element, properties: Mapping[str, str]) -> Log4jConfig:
    """Read a ``Configuration`` of log4j; ``properties`` are Java's, for ``${sys:…}``."""
    config = Log4jConfig()
    if attribute(root, "monitorInterval", "0") != "0":
        config.remarks.append("monitorInterval has no effect: the file is read once.")
    lookups = Lookups(dict(properties), config.remarks)
    for element in root.iter():
        if tag(element) == "property":
            value = element.get("value") or (element.text or "").strip()
            lookups.properties[element.get("name", "")] = lookups.resolve(value)
    for element in root.iter():
        lookups.resolve_attributes(element)
    for section in root.iter():
        if tag(section) == "appenders":
            for appender in section:
                config.appenders[appender.get("name", "")] = appender
    for element in root.iter():
        if tag(element) in _LOGGERS:
            _read_logger(element, config)
    return config


def tag(element: ET.Element) -> str:
    """What an element is, in small letters."""
    kind = element.tag.rpartition("}")[2].lower()
    if kind in ("appender", "layout", "filter") and element.get("type"):
        return element.get("type", "").lower()
    return kind


def attribute(element: ET.Element, name: str, default: str = "") -> str:
    """An attribute, which may be an element of that name inside."""
    for key, value in element.attrib.items():
        if key.lower() == name.lower():
            return value
    for child in element:
        if tag(child) == name.lower():
            return (child.text or "").strip()
    return default


def _read_logger(element: ET.Element, config: Log4jConfig) -> None:
    name = "" if tag(element).endswith("root") else attribute(element, "name")
    if _JAVA_LIBRARIES.fullmatch(name):
        return
    nested = element.find("{*}level")
    word = element.get("level") or (nested.get("value") if nested is not None else None)
    ours, level = _our_name(name), LEVELS.get(word.strip().lower()) if word else None
    if ours is None or (word and level is None):
        what = f"with level {word!r}" if word else "and its appenders"
        config.remarks.append(f"Logger {name or 'root'} {what} is ignored.")
        return
    references = [child for child in element if tag(child) in ("appenderref", "appender-ref")]
    config.loggers.append(
        Log4jLogger(
            ours,
            level,
            attribute(element, "additivity", "true").strip().lower() != "false",
            tuple(
                (attribute(ref, "ref"), LEVELS.get(attribute(ref, "level").lower(), 0))
                for ref in references
            ),
        )
    )


def _our_name(name: str) -> str | None:
    if name in ("", "root"):
        return "root"
    if name in _OUR_LOGGERS or name.partition(".")[0] == "marserve":
        return name
    return "marserve" if name in _SERVER_LOGGERS else None


class Lookups:
    """Resolves ``${…}``; adds to ``remarks`` what could not be resolved."""

    def __init__(self, properties: dict[str, str], remarks: list[str]) -> None:
        self.properties = properties
        self._remarks = remarks

    def resolve_attributes(self, element: ET.Element) -> None:
        """Resolve the lookups in the attributes of an element, and in its text."""
        for key, value in element.attrib.items():
            if key.lower() == "filepattern":  # dates of the moment in which the file is turned
                value = re.sub(r"\$\$?\{date:([^{}]*)\}", r"%d{\1}", value)
            element.set(key, self.resolve(value))
        if element.text and "${" in element.text:
            element.text = self.resolve(element.text)

    def resolve(self, text: str) -> str:
        """The text with values for lookups; those that have none stay."""
        for _ in range(_MAX_LOOKUP_DEPTH):  # they may be nested
            text, count = _LOOKUP.subn(self._value, text)
            if not count:
                break
            if len(text) > _MAX_VALUE_LENGTH:
                limit = f"{_MAX_VALUE_LENGTH} characters"
                self._remarks.append(f"A value with lookups is cut after {limit}.")
                text = text[:_MAX_VALUE_LENGTH]
                break
        return text.replace("\0", "${")

    def _value(self, match: re.Match[str]) -> str:
        key, has_default, default = match[1].partition(":-")
        kind, _, name = key.rpartition(":")
        value = self._found(kind, name)
        if value is None and not has_default:
            self._remarks.append(f"${{{key}}} has no value.")
            return f"\0{key}}}"
        return default if value is None else value

    def _found(self, kind: str, name: str) -> str | None:
        match kind:
            case "env":
                return os.environ.get(name)
            case "sys":
                return self.properties.get(name) or _SYSTEM_PROPERTIES.get(name, lambda: None)()
            case "date":
                return date_format(name)(dt.datetime.now().astimezone())
            case "" if name == "hostName":
                return socket.gethostname()
            case "":
                return self.properties.get(name) or os.environ.get(name)
        return None
