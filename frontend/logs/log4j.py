"""A configuration of log4j (version 2 or 1, xml or properties), read into one shape.

Whatever the dialect, what comes out is the tree of log4j 2's xml with lookups resolved:
``${env:LOG_LOCATION:-logs}``, ``${sys:name}``, ``${name}`` of the file's properties. What its
appenders and loggers become here is for `appenders` and `config` to say.
"""

import datetime as dt
import os
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
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
_DEEPEST_LOOKUP = 10
# Lookups that lead to one another make a value grow without end.
_LONGEST_VALUE = 100_000
_V1_APPENDERS = {
    "ConsoleAppender": "Console",
    "FileAppender": "File",
    "RollingFileAppender": "RollingFile",
    "DailyRollingFileAppender": "RollingFile",
}


@dataclass(frozen=True)
class Log4jLogger:
    """A logger, by our name.

    Attributes:
        name: ``root`` for the root logger.
        level: None where its parent's counts.
        is_additive: Whether its parents' appenders get its records, too.
        appenders: Names of its own, each with the least level it gets.
    """

    name: str
    level: int | None
    is_additive: bool
    appenders: tuple[tuple[str, int], ...]


@dataclass
class Log4jConfig:
    """What a file says.

    Attributes:
        appenders: By name.
        loggers: Those that there are here.
        told: Sentences on what was not taken over.
    """

    appenders: dict[str, ET.Element] = field(default_factory=dict)
    loggers: list[Log4jLogger] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def read_log4j(root: ET.Element, properties: Mapping[str, str]) -> Log4jConfig:
    """Read a tree of log4j's.

    Args:
        root: Its ``Configuration``.
        properties: Java's system properties, for ``${sys:…}``.
    """
    config = Log4jConfig()
    if attribute(root, "monitorInterval", "0") != "0":
        config.told.append("monitorInterval has no effect: the file is read once.")
    lookups = Lookups(dict(properties), config.told)
    for element in root.iter():
        if tag(element) == "property":
            value = element.get("value") or (element.text or "").strip()
            lookups.properties[element.get("name", "")] = lookups.resolve(value)
    for element in root.iter():
        lookups.resolve_attributes(element)
    for section in root.iter():
        if tag(section) == "appenders":
            for one in section:
                config.appenders[one.get("name", "")] = one
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
        config.told.append(f"Logger {name or 'root'} {what} is ignored.")
        return
    references = [one for one in element if tag(one) in ("appenderref", "appender-ref")]
    config.loggers.append(
        Log4jLogger(
            ours,
            level,
            attribute(element, "additivity", "true").strip().lower() != "false",
            tuple(
                (attribute(one, "ref"), LEVELS.get(attribute(one, "level").lower(), 0))
                for one in references
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
    """Resolves ``${…}``.

    Args:
        properties: Of Java's system and of the file.
        told: Takes sentences on what could not be resolved.
    """

    def __init__(self, properties: dict[str, str], told: list[str]) -> None:
        self.properties = properties
        self._told = told

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
        for _ in range(_DEEPEST_LOOKUP):  # they may be in one another
            text, count = _LOOKUP.subn(self._value, text)
            if not count:
                break
            if len(text) > _LONGEST_VALUE:
                self._told.append(f"A value with lookups is cut after {_LONGEST_VALUE} characters.")
                text = text[:_LONGEST_VALUE]
                break
        return text.replace("\0", "${")

    def _value(self, match: re.Match[str]) -> str:
        key, has_default, default = match[1].partition(":-")
        kind, _, name = key.rpartition(":")
        value = self._found(kind, name)
        if value is None and not has_default:
            self._told.append(f"${{{key}}} has no value.")
            return f"\0{key}}}"
        return default if value is None else value

    def _found(self, kind: str, name: str) -> str | None:
        match kind:
            case "env":
                return os.environ.get(name)
            case "sys":
                return self.properties.get(name) or _system_property(name)
            case "date":
                return date_format(name)(dt.datetime.now().astimezone())
            case "" if name == "hostName":
                return socket.gethostname()
            case "":
                return self.properties.get(name) or os.environ.get(name)
        return None


def _system_property(name: str) -> str | None:
    match name:
        case "user.dir":
            return str(Path.cwd())
        case "user.home":
            return str(Path.home())
        case "java.io.tmpdir":
            return os.environ.get("TMPDIR", "/tmp")  # noqa: S108 - Java's own default
    return None


# -- properties ------------------------------------------------------------------------------------


def tree_of_properties(properties: Mapping[str, str]) -> ET.Element:
    """log4j's properties as the tree that they stand for."""
    root = ET.Element("Configuration")
    is_first = any(key.startswith("log4j.") for key in properties)
    root.extend(_of_version_1(properties) if is_first else _of_version_2(properties))
    return root


def _of_version_2(properties: Mapping[str, str]) -> Iterator[ET.Element]:
    """``appender.a.type = Console``, ``logger.l.appenderRef.r.ref = a``, and the like."""
    groups = _nested(properties)
    for name, value in _group(groups, "property").items():
        if isinstance(value, str):
            yield ET.Element("Property", name=name, value=value)
    appenders = ET.Element("Appenders")
    appenders.extend(_component(one, "") for one in _groups_in(groups, "appender").values())
    yield appenders
    for name, one in _groups_in(groups, "logger").items():
        yield _component({"name": name, **one}, "Logger")
    root = groups.get("rootLogger")
    if isinstance(root, dict):
        yield _component(root, "Root")
    elif isinstance(root, str):  # "info, STDOUT"
        yield _short_logger("Root", {}, root)


_Nested = dict[str, "str | _Nested"]


def _nested(properties: Mapping[str, str]) -> _Nested:
    """``a.b.c = v`` as dictionaries in one another."""
    top: _Nested = {}
    for key, value in properties.items():
        *path, last = key.split(".") if not key.startswith("property.") else key.split(".", 1)
        inner = top
        for name in path:
            found = inner.setdefault(name, {})
            if not isinstance(found, dict):
                found = inner[name] = {"level": found}
            inner = found
        inner[last] = value
    return top


def _group(groups: _Nested, name: str) -> _Nested:
    found = groups.get(name)
    return found if isinstance(found, dict) else {}


def _groups_in(groups: _Nested, name: str) -> dict[str, _Nested]:
    return {key: one for key, one in _group(groups, name).items() if isinstance(one, dict)}


def _component(group: _Nested, kind: str) -> ET.Element:
    named = group.get("type")
    element = ET.Element(named if isinstance(named, str) else kind or "Unknown")
    for key, value in group.items():
        if isinstance(value, str):
            if key != "type":
                element.set(key, value)
        elif key == "appenderRef":
            references = [one for one in value.values() if isinstance(one, dict)]
            element.extend(_component(one, "AppenderRef") for one in references)
        else:
            element.append(_component(value, key))
    return element


def _of_version_1(properties: Mapping[str, str]) -> Iterator[ET.Element]:
    """``log4j.appender.a = org.apache.log4j.ConsoleAppender``, ``log4j.logger.l = INFO, a``."""
    for name, value in properties.items():
        if not name.startswith("log4j."):
            yield ET.Element("Property", name=name, value=value)
    appenders = ET.Element("Appenders")
    yield appenders
    for key, value in properties.items():
        _, _, name = key.partition(".")
        kind, _, rest = name.partition(".")
        if kind == "appender" and "." not in rest:
            appenders.append(_appender_of_version_1(rest, value, properties))
        elif kind in ("logger", "category"):
            additivity = properties.get(f"log4j.additivity.{rest}", "true")
            yield _short_logger("Logger", {"name": rest, "additivity": additivity}, value)
        elif kind in ("rootLogger", "rootCategory"):
            yield _short_logger("Root", {}, value)


def _short_logger(kind: str, attributes: dict[str, str], text: str) -> ET.Element:
    """A logger whose level and appenders stand in one line."""
    level, *references = (part.strip() for part in text.split(","))
    element = ET.Element(kind, attributes)
    if level:
        element.set("level", level)
    for ref in references:
        ET.SubElement(element, "AppenderRef", ref=ref)
    return element


def _appender_of_version_1(name: str, java: str, properties: Mapping[str, str]) -> ET.Element:
    def option(key: str, default: str = "") -> str:
        wanted = f"log4j.appender.{name}.{key}".lower()
        return next((v for k, v in properties.items() if k.lower() == wanted), default)

    kind = java.strip().rpartition(".")[2]
    file = option("File")
    element = ET.Element(_V1_APPENDERS.get(kind, kind), name=name)
    if file:
        element.set("fileName", file)
    if option("Target"):
        element.set("target", option("Target").upper().replace("SYSTEM.", "SYSTEM_"))
    if kind == "RollingFileAppender":
        element.set("filePattern", f"{file}.%i")
        ET.SubElement(element, "SizeBasedTriggeringPolicy", size=option("MaxFileSize", "10 MB"))
        ET.SubElement(element, "DefaultRolloverStrategy", max=option("MaxBackupIndex", "1"))
    elif kind == "DailyRollingFileAppender":
        date = option("DatePattern", "'.'yyyy-MM-dd")
        element.set("filePattern", f"{file}%d{{{date}}}")
        ET.SubElement(element, "TimeBasedTriggeringPolicy")
    if option("Threshold"):
        ET.SubElement(element, "ThresholdFilter", level=option("Threshold"))
    if option("layout"):
        layout = ET.SubElement(element, option("layout").strip().rpartition(".")[2])
        layout.set("pattern", option("layout.ConversionPattern", "%m%n"))
    return element
