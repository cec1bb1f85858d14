"""A configuration of log4j 2, in xml or properties, as a tree of `Node`.

Lookups are resolved in it: ``${env:LOG_LOCATION:-logs}``, ``${sys:name}``, ``${date:yyyy-MM}``, and
``${name}`` of the file's properties.
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


def tree_of_xml(element: ET.Element) -> Node:
    """Return the tree of an element."""
    node = Node(element.tag.rpartition("}")[2])
    node.attributes = {key.lower(): value for key, value in element.attrib.items()}
    if node.kind in _TYPED:
        node.name = node.attributes.get("type") or node.name
    if text := (element.text or "").strip():
        node.attributes.setdefault("value", text)
    for child in element:
        node.add(tree_of_xml(child))
    return node


def tree_of_properties(properties: Mapping[str, str]) -> Node:
    """Return the tree of ``appender.a.type = Console``, ``logger.l.level = info`` and the like."""
    groups: dict[tuple[str, ...], Node] = {(): Node("")}
    root, appenders = Node("Configuration"), Node("Appenders")

    def group(*path: str) -> Node:
        if path not in groups:
            groups[path] = Node(path[-1])
            group(*path[:-1]).children.append(groups[path])
        return groups[path]

    for key, value in properties.items():
        *path, last = key.split(".")
        if path[:1] == ["property"]:
            name = key.removeprefix("property.")
            root.children.append(Node("Property", {"name": name, "value": value}))
        else:
            group(*path).attributes[last.lower()] = value
    for place, node in groups.items():  # rootLogger = INFO, beside rootLogger.appenderRef.c.ref = c
        if place and (level := groups[place[:-1]].attributes.pop(place[-1].lower(), "")):
            node.attributes.setdefault("level", level)
    appenders.children = [_typed(each) for each in group("appender").children]
    root.children.append(appenders)
    for each in group("logger").children:
        each.attributes.setdefault("name", each.name)
        root.children.append(_typed(each, "Logger"))
    if short := group().get("rootLogger"):  # "info, STDOUT"
        level, *names = (part.strip() for part in short.split(","))
        references = [Node("AppenderRef", {"ref": name}) for name in names]
        root.children.append(Node("Root", {"level": level}, references))
    elif ("rootLogger",) in groups:
        root.children.append(_typed(group("rootLogger"), "Root"))
    return root


def _typed(group: Node, name: str = "") -> Node:
    """Return the node of a group, whose name is its type."""
    node = Node(group.attributes.pop("type", name or group.name), group.attributes)
    for child in group.children:
        if child.name == "appenderRef":
            node.children += [_typed(each, "AppenderRef") for each in child.children]
        else:
            node.add(_typed(child))
    return node


def resolve_lookups(root: Node, properties: Mapping[str, str], remarks: list[str]) -> None:
    """Resolve the lookups of a tree; ``properties`` are Java's, for ``${sys:…}``.

    ``remarks`` gets a sentence on each lookup that has no value.
    """
    lookups = _Lookups(dict(properties), remarks)
    for node in root.walk():
        if node.kind == "property":
            lookups.properties[node.get("name")] = lookups.resolve(node.get("value"))
    for node in root.walk():
        for key, value in node.attributes.items():
            if key == "filepattern":  # the date is that of the rollover
                value = re.sub(r"\$\$?\{date:([^{}]*)\}", r"%d{\1}", value)
            node.attributes[key] = lookups.resolve(value)


@dataclass
class _Lookups:
    properties: dict[str, str]  # of Java and of the file
    remarks: list[str]

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
