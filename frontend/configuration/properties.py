"""Java properties text to a dictionary and back: the syntax of ``config.properties``."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple


class ConfigError(Exception):
    """The configuration cannot be used; the text names key, value and what is allowed."""


_BLANK = " \t\f"
_ENTRY = re.compile(rf"((?:\\.|[^\\=:{_BLANK}])*)[{_BLANK}]*[=:]?[{_BLANK}]*(.*)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPED = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_SPECIAL = re.compile(r"[\\=:#!]|[^ -~]")
_WRITTEN = {plain: "\\" + letter for letter, plain in _ESCAPED.items()}


class Entry(NamedTuple):
    """A key and its value, and the line where they begin; the first line is 1."""

    key: str
    value: str
    line: int


def read_entries(text: str) -> list[Entry]:
    """Return the stripped entries of Java properties, in order.

    Raises:
        ConfigError: An escape is not a character.
    """
    entries = []
    for number, line in _logical_lines(text):
        match = _ENTRY.fullmatch(line)
        assert match is not None  # every logical line is a key and a rest, both perhaps empty
        key, value = (_unescape(part).strip() for part in match.groups())
        entries.append(Entry(key, value, number))
    return entries


def parse_properties(text: str) -> dict[str, str]:
    """Return the values of Java properties by key; of a repeated key the last one."""
    return {entry.key: entry.value for entry in read_entries(text)}


def format_properties(entries: Mapping[str, str], comments: Iterable[str] = ()) -> str:
    """Return Java properties as Java writes them: anything but plain ASCII is escaped."""
    lines = [f"#{comment}\n" for comment in comments]
    for key, value in entries.items():
        escaped = _escape(key).replace(" ", "\\ ")
        lines.append(f"{escaped}={_escape(value)}\n")
    return "".join(lines)


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments and blanks, continued ones joined, and their numbers."""
    pending, first = "", 0
    # Not splitlines(): it also splits at characters that Java reads as ordinary ones.
    for number, line in enumerate(re.split(r"\r\n|\r|\n", text), start=1):
        rest = line.lstrip(_BLANK)
        if not pending and rest.startswith(("#", "!")):
            continue
        first = first if pending else number
        pending += rest
        if (len(rest) - len(rest.rstrip("\\"))) % 2:  # the last backslash is no escaped one
            pending = pending[:-1]
            continue
        if pending:
            yield first, pending
        pending = ""
    if pending:
        yield first, pending


def _unescape(text: str) -> str:
    plain = _ESCAPE.sub(_character, text)
    try:
        # Java writes characters beyond the first 65,536 as two escapes: join them.
        return plain.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ConfigError(f"Invalid configuration: {text!r} holds half a character") from error


def _character(match: re.Match[str]) -> str:
    code, letter = match.groups()
    if code:
        return chr(int(code, 16))
    if letter == "u":
        raise ConfigError(r"Invalid configuration: \u wants four hexadecimal digits behind it")
    return _ESCAPED.get(letter, letter)


def _escape(text: str) -> str:
    return _SPECIAL.sub(lambda match: _written(match[0]), text)


def _written(character: str) -> str:
    if character in _WRITTEN:
        return _WRITTEN[character]
    if " " < character <= "~":
        return "\\" + character
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02X}{units[i + 1]:02X}" for i in range(0, len(units), 2))
