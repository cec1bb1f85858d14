"""log4j's properties, of version 2 or 1, as the tree of log4j 2's xml that they stand for."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping

_V1_APPENDERS = {
    "ConsoleAppender": "Console",
    "FileAppender": "File",
    "RollingFileAppender": "RollingFile",
    "DailyRollingFileAppender": "RollingFile",
}


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
    appenders.extend(_component(group, "") for group in _groups_in(groups, "appender").values())
    yield appenders
    for name, group in _groups_in(groups, "logger").items():
        yield _component({"name": name, **group}, "Logger")
    root = groups.get("rootLogger")
    if isinstance(root, dict):
        yield _component(root, "Root")
    elif isinstance(root, str):  # "info, STDOUT"
        yield _short_logger("Root", {}, root)


_Nested = dict[str, "str | _Nested"]


def _nested(properties: Mapping[str, str]) -> _Nested:
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
    return {key: group for key, group in _group(groups, name).items() if isinstance(group, dict)}


def _component(group: _Nested, kind: str) -> ET.Element:
    named = group.get("type")
    element = ET.Element(named if isinstance(named, str) else kind or "Unknown")
    for key, value in group.items():
        if isinstance(value, str):
            if key != "type":
                element.set(key, value)
        elif key == "appenderRef":
            references = [group for group in value.values() if isinstance(group, dict)]
            element.extend(_component(group, "AppenderRef") for group in references)
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
        full = f"log4j.appender.{name}.{key}".lower()
        return next((v for k, v in properties.items() if k.lower() == full), default)

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
