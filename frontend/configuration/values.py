"""Text of a properties file to value; a ValueError completes the sentence "expected ..."."""

import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_URL = re.compile(r"(?<=://)(?:[^\s/?#]*@)?([^\s?#]*)(?:[?#]\S*)?")
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


def boolean(text: str) -> bool:
    """Reads true or false, in any case of letters."""
    if text.lower() not in ("true", "false"):
        raise ValueError("true or false")
    return text.lower() == "true"


def whole(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """Makes a parser of decimal whole numbers from ``minimum`` on, or up to ``maximum``."""
    allowed = f"{minimum} or more" if maximum == math.inf else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        if not _WHOLE.fullmatch(text) or not minimum <= int(text) <= maximum:
            raise ValueError(f"a whole number, {allowed}")
        return int(text)

    return parse


def whole_or(word: str, number: int, minimum: int, maximum: int) -> Callable[[str], int]:
    """Makes a parser of whole numbers, and of a word that stands for another number."""
    parse_number = whole(minimum, maximum)

    def parse(text: str) -> int:
        if text.lower() == word:
            return number
        try:
            return parse_number(text)
        except ValueError as error:
            raise ValueError(f"{word}, or {error}") from None

    return parse


def not_negative(text: str) -> float:
    """Reads a plain decimal number."""
    if not _DECIMAL.fullmatch(text):
        raise ValueError("a number, 0 or more")
    return float(text)


def positive(text: str) -> float:
    """Reads a plain decimal number above 0."""
    if not _DECIMAL.fullmatch(text) or float(text) == 0:
        raise ValueError("a number above 0")
    return float(text)


def one_of(*words: str) -> Callable[[str], str]:
    """Makes a parser that accepts these words, in any case of letters."""

    def parse(text: str) -> str:
        if text.lower() not in words:
            raise ValueError(" or ".join(words))
        return text.lower()

    return parse


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Compiles a regular expression."""
    try:
        return re.compile(text, flags)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"a regular expression ({error})") from error


def url_patterns(text: str) -> tuple[re.Pattern[str], ...]:
    """Compiles a comma list of expressions that do not mind the case of letters."""
    return tuple(pattern(item, re.IGNORECASE) for item in _items(text))


def modules(text: str) -> tuple[str, ...]:
    """Reads a comma list of import names."""
    names = _items(text)
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        raise ValueError("import names of modules, separated by commas")
    return names


def identifier(text: str) -> str:
    """Reads the name of a module."""
    if not text.isidentifier():
        raise ValueError("the name of a module")
    return text


def header_name(text: str) -> str:
    """Reads the name of a header."""
    if not re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", text):
        raise ValueError("the name of a header")
    return text


def arguments(text: str) -> tuple[str, ...]:
    """Reads arguments as a shell would split them, nothing replaced."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"arguments, quoted as in a shell ({error})") from error


def models_to_load(text: str) -> tuple[str, ...]:
    """Reads a comma list of ``url`` and ``name=url``; ``("all",)`` means the whole model store."""
    return ("all",) if text.lower() == "all" else _items(text)


def _items(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def program(text: str) -> Path:
    """Finds a program by its path, or by its name in PATH."""
    found = shutil.which(text)
    if found is None:
        raise ValueError("a program that can be run")
    return Path(found).absolute()


def absolute_path(text: str) -> Path:
    """Reads a path, absolute for workers elsewhere; without ``..``, to compare it as text."""
    if "\0" in text:
        raise ValueError("a path, without a zero byte")
    path = Path(text).absolute()
    return path.resolve() if ".." in path.parts else path


def path_or_url(*schemes: str) -> Callable[[str], str]:
    """A reader of paths, which become absolute, and of URLs of some schemes."""

    def parse(text: str) -> str:
        scheme, separator, rest = text.partition("://")
        if not separator:
            return str(absolute_path(text))
        if scheme.lower() not in schemes or not rest.partition("/")[0]:
            raise ValueError(f"a path, or a URL of {', '.join(schemes)}")
        return f"{scheme.lower()}://{rest}"

    return parse


def without_secrets(text: str) -> str:
    """Remove users, passwords, queries (which may be signatures) and fragments of URLs."""
    return _URL.sub(r"\1", text)


def plain_number(value: object) -> object:
    """The number that a JSON text or fraction stands for, as in TorchServe; else the value."""
    if isinstance(value, str) and _WHOLE.fullmatch(text := value.strip()):
        return int(text)  # which itself takes fewer characters for blanks
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
