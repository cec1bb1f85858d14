"""YAML from files that may be anybody's: its size is known before anything is built of it.

A page of YAML can stand for more than any memory holds: an alias repeats what its anchor names, a
merge (``<<``) copies it, a number in base 60 (``1:1:1``) is worked out digit by digit. So the
events of a document are counted first, each alias as all that it repeats; only then are they made
into values, which takes time and memory in proportion to that count.
"""

import re
from collections.abc import Iterator
from typing import IO, Any

import yaml

MAX_BYTES = 1 << 20
MAX_NODES = 100_000  # scalars, lists and mappings, those included that aliases repeat
MAX_DEPTH = 64
MAX_ANCHORS = 1000
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"
# libyaml 0.2.6 reads up to 1024 characters ahead, and refuses more than 1000 open brackets there.
_LIBYAML_TOO_DEEP = "exceeded maximum nesting depth"
_MAX_NUMBER = 100_000  # characters
_MAX_PARTS = 20  # of a number in base 60
_NUMBER = re.compile(r"[-+]?[0-9.][0-9_:.a-fA-FoxX+-]*")
# Whole numbers beyond 60 bits may be chosen so that all have one place in a dictionary.
_WORD_CHARACTERS = 18
_MAX_BEYOND_WORDS = 1000

# libyaml's is many times as fast, and its errors do not quote the document.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class YamlTooLarge(ValueError):
    """A document beyond the bounds; the text is a part of a sentence, behind the file's name."""


def load_yaml(text: str | bytes) -> Any:
    """The values of a document, made by YAML's safe rules.

    Raises:
        YamlTooLarge: It is longer, deeper, or stands for more than the bounds allow.
        yaml.YAMLError, ValueError, ...: It is no YAML, or a value is none of its type. The parser
            has many corners: whoever reads foreign files should expect any exception.
    """
    if len(text) > MAX_BYTES:
        raise YamlTooLarge(f"is longer than {MAX_BYTES} bytes")
    _check_size(text)
    return yaml.load(text, _Loader)  # noqa: S506 - one of the two safe ones


def read_yaml(file: IO[bytes]) -> Any:
    """The values of an open file, of which not more is read than may be in it; as `load_yaml`."""
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
    """Counts nodes while they come, those that an alias repeats again each time."""

    def __init__(self) -> None:
        self._anchored: dict[str, int] = {}  # anchor → the number of nodes that it names
        self._opened: list[tuple[str | None, int]] = []  # anchor, and the count before
        self._count = 0

    def add(self, anchor: str | None, count: int = 1) -> None:
        self._count += count
        if self._count > MAX_NODES:
            raise YamlTooLarge(f"stands for more than {MAX_NODES} values")
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
