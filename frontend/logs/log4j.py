"""A configuration of log4j (version 1 or 2, xml or properties), read into one shape.

Both formats become a tree of `Node`. Lookups are resolved in it: ``${env:LOG_LOCATION:-logs}``,
``${sys:name}``, and ``${name}`` of the file's properties.
"""

import datetime as dt
import os
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.logs.dates import date_format
from marserve.frontend.logs.levels import LEVELS

_OUR_LOGGERS = ("MODEL_LOG", "ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
# TorchServe's own file sets levels of these; they are not part of this server.
_JAVA_LIBRARIES = re.compile(
    r"(io\.(netty|grpc|prometheus)|org\.(apache|eclipse)|com\.google)(\..*)?"
)
_LOGGERS = ("logger", "asynclogger", "root", "asyncroot", "category")
_TYPED = ("appender", "layout", "filter")  # may name their kind in an attribute
_GROUPS = ("filter", "filters", "policies")
_LOOKUP = re.compile(r"\$\$?\{([^${}]*)\}")
_MAX_LOOKUP_DEPTH = 10
# Lookups that contain one another make a value grow without end.
_MAX_VALUE_LENGTH = 100_000
_SYSTEM_PROPERTIES: dict[str, Callable[[], str | None]] = {
    "user.dir": lambda: str(Path.cwd()),
    "user.home": lambda: str(Path.home()),
    "java.io.tmpdir": lambda: os.environ.get("TMPDIR", "/tmp"),  # noqa: S108 - Java's own default
}


@dataclass
class Node:
    """A component of a configuration: an appender, a layout, a logger and the like."""

    name: str
    attributes: dict[str, str] = field(default_factory=dict)  # by names in lower case
    children: list["Node"] = field(default_factory=list)

    @classmethod
    def from_xml(cls, element: ET.Element) -> "Node":
        """Return the tree of an element."""
        node = cls(element.tag.rpartition("}")[2])
        node.attributes = {key.lower(): value for key, value in element.attrib.items()}
        if node.kind in _TYPED:
            node.name = node.attributes.get("type") or node.name
        if text := (element.text or "").strip():
            node.attributes.setdefault("value", text)
        for child in element:
            node.add(cls.from_xml(child))
        return node

    @property
    def kind(self) -> str:
        """The name in lower case."""
        return self.name.lower()

    def get(self, name: str, default: str = "") -> str:
        """Return an attribute."""
        return self.attributes.get(name.lower(), default)

    def add(self, child: "Node") -> None:
        """Add a child; one that is only a value, as ``<Pattern>%m</Pattern>``, as an attribute."""
        if child.attributes.keys() == {"value"} and not child.children:
            self.attributes.setdefault(child.kind, child.get("value"))
        elif child.kind in _GROUPS:
            self.children += child.children
        else:
            self.children.append(child)

    def walk(self) -> Iterator["Node"]:
        """Iterate over the node and all below it."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += reversed(node.children)


@dataclass(frozen=True)
class Log4jLogger:
    """A logger by its name here; ``root`` is the root logger."""

    name: str
    level: int | None  # None where its parent's applies
    is_additive: bool  # whether its parents' appenders get its records, too
    appenders: tuple[tuple[str, int], ...]  # names, each with the lowest level that it gets


@dataclass
class Log4jConfig:
    """The content of a file; ``remarks`` are sentences on what has no effect."""

    properties: dict[str, str]  # of Java and of the file
    appenders: dict[str, Node] = field(default_factory=dict)  # by name
    loggers: list[Log4jLogger] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def resolve_attributes(self, node: Node) -> None:
        """Resolve the lookups in the attributes of a node."""
        for key, value in node.attributes.items():
            if key == "filepattern":  # the date is that of the rollover
                value = re.sub(r"\$\$?\{date:([^{}]*)\}", r"%d{\1}", value)
            node.attributes[key] = self.resolve(value)

    def resolve(self, text: str) -> str:
        """Return the text with values for lookups; those that have none stay."""
        for _ in range(_MAX_LOOKUP_DEPTH):  # they may be nested
            text, count = _LOOKUP.subn(self._value, text)
            if not count:
                break
            if len(text) > _MAX_VALUE_LENGTH:
                limit = f"{_MAX_VALUE_LENGTH} characters"
                self.remarks.append(f"A value with lookups is cut after {limit}.")
                text = text[:_MAX_VALUE_LENGTH]
                break
        return text.replace("\0", "${")

    def _value(self, match: re.Match[str]) -> str:
        key, has_default, default = match[1].partition(":-")
        kind, _, name = key.rpartition(":")
        value = self._find(kind, name)
        if value is None and not has_default:
            self.remarks.append(f"${{{key}}} has no value.")
            return f"\0{key}}}"
        return default if value is None else value

    def _find(self, kind: str, name: str) -> str | None:
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


def read_log4j(root: Node, properties: Mapping[str, str]) -> Log4jConfig:
    """Read a ``Configuration`` of log4j; ``properties`` are Java's, for ``${sys:…}``."""
    config = Log4jConfig(dict(properties))
    if root.get("monitorInterval", "0") != "0":
        config.remarks.append("monitorInterval has no effect: the file is read once.")
    for node in root.walk():
        if node.kind == "property":
            config.properties[node.get("name")] = config.resolve(node.get("value"))
    for node in root.walk():
        config.resolve_attributes(node)
    for node in root.walk():
        if node.kind == "appenders":
            config.appenders |= {child.get("name"): child for child in node.children}
        elif node.kind in _LOGGERS:
            _read_logger(node, config)
    return config


def _read_logger(node: Node, config: Log4jConfig) -> None:
    name = "root" if node.kind.endswith("root") else node.get("name") or "root"
    if _JAVA_LIBRARIES.fullmatch(name):
        return
    level_name = node.get("level")
    ours, level = _our_name(name), LEVELS.get(level_name.strip().lower())
    if ours is None or (level_name and level is None):
        what = f"with level {level_name!r}" if level_name else "and its appenders"
        config.remarks.append(f"Logger {name} {what} is ignored.")
        return
    references = [child for child in node.children if child.kind in ("appenderref", "appender-ref")]
    config.loggers.append(
        Log4jLogger(
            ours,
            level,
            node.get("additivity", "true").strip().lower() != "false",
            tuple((ref.get("ref"), LEVELS.get(ref.get("level").lower(), 0)) for ref in references),
        )
    )


def _our_name(name: str) -> str | None:
    if name == "root" or name in _OUR_LOGGERS or name.partition(".")[0] == "marserve":
        return name
    return "marserve" if name in ("org.pytorch.serve", "com.amazonaws.ml.ts") else None
