"""Parses untrusted YAML; its expanded size is checked before values are created.

A short document can expand beyond any memory: an alias repeats the nodes of its anchor, a merge
(``<<``) copies them, a number in base 60 (``1:1:1``) is computed digit by digit. So the events of a
document are counted first, each alias with all the nodes that it repeats.
"""

import re
from collections.abc import Iterator
from typing import IO, Any

import yaml

MAX_BYTES = 1 << 20
MAX_NODES = 100_000  # scalars, lists and mappings, including those that aliases repeat
MAX_DEPTH = 64
MAX_ANCHORS = 1000
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"
# libyaml 0.2.6 reads up to 1024 characters ahead, and refuses more than 1000 open brackets there.
_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
_MAX_NUMBER = 100_000  # characters
_MAX_PARTS = 20  # of a number in base 60
_NUMBER = re.compile(r"[-+]?[0-9.][0-9_:.a-fA-FoxX+-]*")
# Whole numbers beyond 60 bits can be chosen so that all have the same hash.
_WORD_CHARACTERS = 18
_MAX_BEYOND_WORDS = 1000

# libyaml's loader is much faster, and its errors do not quote the document.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlTooLarge(ValueError):
    """A document beyond the limits; the text follows the name of the file in a sentence."""


def load_yaml(text: str | bytes) -> Any:
    """Return the values of a document, by YAML's safe rules.

    Raises:
        YamlTooLarge: It is too long, too deep, or expands to too many values.
        yaml.YAMLError, ValueError, ...: It is not YAML, or a value does not match its type. For
            untrusted files, callers must expect any exception.
    """
    if len(text) > MAX_BYTES:
        raise YamlTooLarge(f"is longer than {MAX_BYTES} bytes")
    _check_size(text)
    return yaml.load(text, _Loader)  # noqa: S506 - one of the two safe ones


def read_yaml(file: IO[bytes]) -> Any:
    """Return the values of an open file, as `load_yaml`; at most the maximum size is read."""
    return load_yaml(file.read(MAX_BYTES + 1))


def _check_size(text: str | bytes) -> None:
    nodes, long_numbers = _Nodes(), 0
    for event in _events(text):
        match event:
            case yaml.CollectionStartEvent():
                nodes.open(event.anchor)
            case yaml.CollectionEndEvent():
                nodes.close()
            case yaml.AliasEvent():
                nodes.repeat(event.anchor)
            case yaml.ScalarEvent():
                nodes.add(event.anchor)
                if len(event.value) > _WORD_CHARACTERS and _is_number(event):
                    _check_number(event.value)
                    long_numbers += "." not in event.value
                    if long_numbers > _MAX_BEYOND_WORDS:
                        raise YamlTooLarge(f"has more than {_MAX_BEYOND_WORDS} very long numbers")


def _events(text: str | bytes) -> Iterator[yaml.Event]:
    try:
        for event in yaml.parse(text, _Loader):
            yield event
            if isinstance(event, yaml.DocumentEndEvent):
                return  # there may be one only, which the loader says better
    except yaml.MarkedYAMLError as error:
        if error.problem == _LIBYAML_TOO_DEEP:
            raise YamlTooLarge(_TOO_DEEP) from None
        raise


def _is_number(scalar: yaml.ScalarEvent) -> bool:
    if scalar.tag is not None and scalar.tag.endswith((":int", ":float")):
        return True
    return bool(scalar.implicit[0] and _NUMBER.fullmatch(scalar.value))


def _check_number(text: str) -> None:
    if len(text) > _MAX_NUMBER or text.count(":") > _MAX_PARTS:
        raise YamlTooLarge("has a number that is too long")


class _Nodes:
    """The number of nodes so far; an alias counts as all that it repeats."""

    def __init__(self) -> None:
        self._anchored: dict[str, int] = {}  # anchor → the number of nodes that it names
        self._opened: list[tuple[str | None, int]] = []  # anchor, and the count before
        self._count = 0

    def add(self, anchor: str | None, count: int = 1) -> None:
        self._count += count
        if self._count > MAX_NODES:
            raise YamlTooLarge(f"expands to more than {MAX_NODES} values")
        if anchor is not None:
            self._note(anchor, count)

    def open(self, anchor: str | None) -> None:
        if len(self._opened) >= MAX_DEPTH:
            raise YamlTooLarge(_TOO_DEEP)
        self._opened.append((anchor, self._count))
        self.add(None)

    def close(self) -> None:
        anchor, before = self._opened.pop()
        if anchor is not None:
            self._note(anchor, self._count - before)

    def repeat(self, anchor: str | None) -> None:
        if any(anchor == each for each, _ in self._opened):
            raise YamlTooLarge("has an alias within what it names")
        self.add(None, self._anchored.get(anchor or "", 1))

    def _note(self, anchor: str, count: int) -> None:
        self._anchored[anchor] = count
        if len(self._anchored) > MAX_ANCHORS:
            raise YamlTooLarge(f"has more than {MAX_ANCHORS} anchors")
