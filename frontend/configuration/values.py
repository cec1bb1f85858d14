"""The kinds of values that only keys of config.properties have, and texts without secrets."""

import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from marserve.frontend.configuration.setting_kinds import Kind

_URL = re.compile(r"(?<=://)(?:[^\s/?#]*@)?([^\s?#]*)(?:[?#]\S*)?")
# The event loop and the system take no times of thousands of years.
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,12})?")
_HEADER = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def parsed(rule: str, parse: Callable[[str], Any]) -> Kind:
    """Return the kind of texts that a function parses; its ValueError may have a narrower rule."""
    return Kind(rule, lambda _: True, parse=parse)


def _decimals(rule: str, is_allowed: Callable[[float], bool]) -> Kind:
    """Return the kind of some plain decimal numbers."""
    return Kind(
        rule,
        lambda value: isinstance(value, float) and is_allowed(value),
        parse=lambda text: float(text) if _DECIMAL.fullmatch(text) else text,
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    try:
        return re.compile(text, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{PATTERN.rule} ({error})") from error


def _arguments(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"{ARGUMENTS.rule} ({error})") from error


def _models_to_load(text: str) -> tuple[str, ...]:
    """Return a comma list of ``url`` and ``name=url``; ``("all",)`` is the whole model store.

    ``standalone`` is TorchServe's documented word for no models.
    """
    if text.strip("\"'").lower() == "standalone":
        return ()
    return ("all",) if text.lower() == "all" else _items(text)


def _absolute(text: str) -> Path:
    """Return an absolute path; without ``..``, to compare it as text."""
    path = Path(text).absolute()
    return path.resolve() if ".." in path.parts else path


def _path_or_url(text: str) -> str:
    """Return an absolute path, or a URL with its scheme in lower case."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return str(ABSOLUTE_PATH.from_text(text))
    if scheme.lower() not in ("http", "https", "s3") or not rest.partition("/")[0]:
        raise ValueError(PATH_OR_URL.rule)
    return f"{scheme.lower()}://{rest}"


NOT_NEGATIVE = _decimals("a number, 0 or more, below 10^9", lambda _: True)
POSITIVE = _decimals("a number above 0, below 10^9", lambda number: number > 0)
SHARE = _decimals("a number from 0 to 1", lambda number: number <= 1)
PATTERN = parsed("a regular expression", _pattern)
URL_PATTERNS = parsed(
    PATTERN.rule, lambda text: tuple(_pattern(item, re.IGNORECASE) for item in _items(text))
)
IDENTIFIER = Kind("the name of a module", str.isidentifier, parse=str)
MODULES = Kind(
    "import names of modules, separated by commas",
    lambda names: all(part.isidentifier() for name in names for part in name.split(".")),
    parse=_items,
)
HEADER_NAME = Kind("the name of a header", lambda text: bool(_HEADER.fullmatch(text)), parse=str)
ARGUMENTS = parsed("arguments, quoted as in a shell", _arguments)
MODELS_TO_LOAD = parsed("archives, separated by commas", _models_to_load)
PROGRAM = Kind(
    "a program that can be run", bool, read=lambda path: Path(path).absolute(), parse=shutil.which
)
ABSOLUTE_PATH = Kind(
    "a path, without a zero byte", lambda text: "\0" not in text, read=_absolute, parse=str
)
PATH_OR_URL = parsed("a path, or a URL of http, https, s3", _path_or_url)


def without_secrets(text: str) -> str:
    """Remove users, passwords, queries (which may be signatures) and fragments of URLs."""
    return _URL.sub(r"\1", text)
