"""log4j's properties, of version 1 or 2, as the tree of log4j 2's xml."""

from collections.abc import Iterator, Mapping

from marserve.frontend.logs.log4j import Node

_V1_APPENDERS = {
    "ConsoleAppender": "Console",
    "FileAppender": "File",
    "RollingFileAppender": "RollingFile",
    "DailyRollingFileAppender": "RollingFile",
}


def tree_of_properties(properties: Mapping[str, str]) -> Node:
    """Return log4j's properties as a tree."""
    is_first = any(key.startswith("log4j.") for key in properties)
    nodes = _of_version_1(properties) if is_first else _of_version_2(properties)
    return Node("Configuration", children=list(nodes))


def _of_version_2(properties: Mapping[str, str]) -> Iterator[Node]:
    """Read ``appender.a.type = Console``, ``logger.l.appenderRef.r.ref = a``, and the like."""
    groups: dict[tuple[str, ...], Node] = {(): Node("")}

    def group(*path: str) -> Node:
        if path not in groups:
            groups[path] = Node(path[-1])
            group(*path[:-1]).children.append(groups[path])
        return groups[path]

    for key, value in properties.items():
        *path, last = key.split(".")
        if path[:1] == ["property"]:
            yield Node("Property", {"name": key.removeprefix("property."), "value": value})
        else:
            group(*path).attributes[last.lower()] = value
    for place, node in groups.items():  # rootLogger = INFO, beside rootLogger.appenderRef.c.ref = c
        if place and (level := groups[place[:-1]].attributes.pop(place[-1].lower(), "")):
            node.attributes.setdefault("level", level)
    yield Node("Appenders", children=[_typed(each) for each in group("appender").children])
    for each in group("logger").children:
        each.attributes.setdefault("name", each.name)
        yield _typed(each, "Logger")
    if root := group().get("rootLogger"):  # "info, STDOUT"
        yield _short_logger("Root", {}, root)
    elif ("rootLogger",) in groups:
        yield _typed(group("rootLogger"), "Root")


def _typed(group: Node, name: str = "") -> Node:
    """Return the node of a group, whose name is its type."""
    node = Node(group.attributes.pop("type", name or group.name), group.attributes)
    for child in group.children:
        if child.name == "appenderRef":
            node.children += [_typed(each, "AppenderRef") for each in child.children]
        else:
            node.add(_typed(child))
    return node


def _of_version_1(properties: Mapping[str, str]) -> Iterator[Node]:
    """Read ``log4j.appender.a = org.apache.log4j.FileAppender``, ``log4j.logger.l = INFO, a``."""
    appenders = Node("Appenders")
    yield appenders
    for key, value in properties.items():
        _, _, name = key.partition(".")
        kind, _, rest = name.partition(".")
        if not key.startswith("log4j."):
            yield Node("Property", {"name": key, "value": value})
        elif kind == "appender" and "." not in rest:
            appenders.children.append(_appender_of_version_1(rest, value, properties))
        elif kind in ("logger", "category"):
            additivity = properties.get(f"log4j.additivity.{rest}", "true")
            yield _short_logger("Logger", {"name": rest, "additivity": additivity}, value)
        elif kind in ("rootLogger", "rootCategory"):
            yield _short_logger("Root", {}, value)


def _short_logger(kind: str, attributes: dict[str, str], text: str) -> Node:
    """Return a logger whose level and appenders are one text."""
    level, *references = (part.strip() for part in text.split(","))
    if level:
        attributes["level"] = level
    return Node(kind, attributes, [Node("AppenderRef", {"ref": ref}) for ref in references])


def _appender_of_version_1(name: str, java: str, properties: Mapping[str, str]) -> Node:
    prefix = f"log4j.appender.{name}.".lower()
    options = {
        key.lower().removeprefix(prefix): value
        for key, value in properties.items()
        if key.lower().startswith(prefix)
    }
    kind = java.strip().rpartition(".")[2]
    file, target = options.get("file", ""), options.get("target", "")
    node = Node(_V1_APPENDERS.get(kind, kind), {"name": name, "filename": file})
    node.attributes["target"] = target.upper().replace("SYSTEM.", "SYSTEM_")
    if kind == "RollingFileAppender":
        node.attributes["filepattern"] = f"{file}.%i"
        size, count = options.get("maxfilesize", "10 MB"), options.get("maxbackupindex", "1")
        node.children += [
            Node("SizeBasedTriggeringPolicy", {"size": size}),
            Node("DefaultRolloverStrategy", {"max": count}),
        ]
    elif kind == "DailyRollingFileAppender":
        date = options.get("datepattern", "'.'yyyy-MM-dd")
        node.attributes["filepattern"] = f"{file}%d{{{date}}}"
        node.children.append(Node("TimeBasedTriggeringPolicy"))
    if threshold := options.get("threshold"):
        node.children.append(Node("ThresholdFilter", {"level": threshold}))
    if layout := options.get("layout"):
        pattern = options.get("layout.conversionpattern", "%m%n")
        node.children.append(Node(layout.strip().rpartition(".")[2], {"pattern": pattern}))
    return node
