"""Parsers of texts of a properties file; a ValueError completes the sentence "expected ..."."""

import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_URL = re.compile(r"(?<=://)(?:[^\s/?#]*@)?([^\s?#]*)(?:[?#]\S*)?")
# The event loop and the system take no times of thousands of years.
_DECIMAL = re.compile(r"[0-9]{1,9}(\.[0-9]{1,12})?")


def whole(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """Return a parser of decimal whole numbers."""
    allowed = f"{minimum} or more" if maximum == math.inf else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        if not _WHOLE.fullmatch(text) or not minimum <= int(text) <= maximum:
            raise ValueError(f"a whole number, {allowed}")
        return int(text)

    return parse


def not_negative(text: str) -> float:
    """Return a plain decimal number."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError("a number, 0 or more, below 10^9")
    return float(text)


def positive(text: str) -> float:
    """Return a plain decimal number above 0."""
    if not _DECIMAL.fullmatch(text) or float(text) == 0:
        raise ValueError("a number above 0, below 10^9")
    return float(text)


def share(text: str) -> float:
    """Return a plain decimal number from 0 to 1."""
    if not _DECIMAL.fullmatch(text) or float(text) > 1:
        raise ValueError("a number from 0 to 1")
    return float(text)


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Return a regular expression."""
    try:
        return re.compile(text, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression ({error})") from error


def url_patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """Return the expressions of a comma list, for any case of letters."""
    return tuple(pattern(item, re.IGNORECASE) for item in _items(text))


def modules(text: str) -> tuple[str, ...]:
    """Return the import names of a comma list."""
    names = _items(text)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("import names of modules, separated by commas")
    return names


def identifier(text: str) -> str:
    """Return the name of a module."""
    if not text.isidentifier():
        raise ValueError("the name of a module")
    return text


def header_name(text: str) -> str:
    """Return the name of a header."""
    if not re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", text):
        raise ValueError("the name of a header")
    return text


def arguments(text: str) -> tuple[str, ...]:
    """Return arguments, split as in a shell."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"arguments, quoted as in a shell ({error})") from error


def models_to_load(text: str) -> tuple[str, ...]:
    """Return a comma list of ``url`` and ``name=url``; ``("all",)`` is the whole model store.

    ``standalone`` is TorchServe's documented word for no models.
    """
    if text.strip("\"'").lower() == "standalone":
        return ()
    return ("all",) if text.lower() == "all" else _items(text)


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def program(text: str) -> Path:
    """Return the path of a program; a name is looked up in PATH."""
    found = shutil.which(text)
    if found is None:
        raise ValueError("a program that can be run")
    return Path(found).absolute()


def absolute_path(text: str) -> Path:
    """Return an absolute path; without ``..``, to compare it as text."""
    if "\0" in text:
        raise ValueError("a path, without a zero byte")
    path = Path(text).absolute()
    return path.resolve() if ".." in path.parts else path


def path_or_url(text: str) -> str:
    """Return an absolute path, or a URL of a web server or of S3."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return str(absolute_path(text))
    if scheme.lower() not in ("http", "https", "s3") or not rest.partition("/")[0]:
        raise ValueError("a path, or a URL of http, https, s3")
    return f"{scheme.lower()}://{rest}"


def without_secrets(text: str) -> str:
    """Remove users, passwords, queries (which may be signatures) and fragments of URLs."""
    return _URL.sub(r"\1", text)


def plain_number(value: object) -> object:
    """Return the number that a JSON text or fraction represents; else the value."""
    if isinstance(value, str) and _WHOLE.fullmatch(text := value.strip()):
        return int(text)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
