"""Text of a properties file to value: one parser per kind of value.

Each raises ValueError with the words that complete "expected ...", so that a wrong value is told
together with what is allowed.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

from marserve.backend.manifest import RUNTIMES
from marserve.frontend.configuration.batching_values import AUTOMATIC, READERS
from marserve.frontend.configuration.repr_limits import shown

#: Workers of a model: more processes than any machine runs. A slip of the hand must not start them.
MOST_WORKERS = 1000

#: Name, version, member; members as they stand in the JSON, those that can be used.
ModelNumbers = Mapping[str, Mapping[str, Mapping[str, object]]]

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_DECIMAL = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")


def boolean(text: str) -> bool:
    """Reads true or false, in any case of letters."""
    try:
        return {"true": True, "false": False}[text.lower()]
    except KeyError:
        raise ValueError("true or false") from None


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Makes a parser of decimal whole numbers from ``minimum`` on, or up to ``maximum``."""
    allowed = f"{minimum} or more" if maximum is None else f"from {minimum} to {maximum}"

    def parse(text: str) -> int:
        if not _WHOLE.fullmatch(text):
            raise ValueError(f"a whole number, {allowed}")
        number = int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(f"a whole number, {allowed}")
        return number

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
    """Reads a path; absolute, because workers have other working directories.

    Without ``..``, so that what lies below it can be known by its text.
    """
    if "\0" in text:
        raise ValueError("a path, without a zero byte")
    path = Path(text).absolute()
    return path.resolve() if ".." in path.parts else path


# -- The `models` key: JSON, name -> version -> settings ------------------------------------------

_MODELS_ALLOWED = 'JSON like {"name": {"version": {"batchSize": 4}}}'
_MODEL_NUMBERS = frozenset(
    {"minWorkers", "maxWorkers", "batchSize", "maxBatchDelay", "responseTimeout", "startupTimeout"}
)
_MODEL_BATCHING = frozenset(READERS) - _MODEL_NUMBERS
_MODEL_RUNTIME = "runtimeType"
_MOST = 2**31 - 1  # a Java int
_MODEL_BYSTANDERS = frozenset({"defaultVersion", "marName"})  # TorchServe never read them here


def model_numbers(text: str) -> ModelNumbers:
    """Reads the settings per name and version.

    Of TorchServe's members, as there, only numbers above 0 count.
    """
    numbers: dict[str, dict[str, dict[str, object]]] = {}
    for name, version, key, value in _model_settings(text):
        if key in _MODEL_BATCHING and value is not None:
            _check_batching(key, value, f"{name} {version}")
        of_version = numbers.setdefault(name, {}).setdefault(version, {})
        if _is_read(value, key):
            of_version[key] = value
    return numbers


def unread_model_settings(text: str) -> Iterator[str]:
    """Yields a sentence for each member that `model_numbers` passes over."""
    for name, version, key, value in _model_settings(text):
        if not _is_read(value, key) and key not in _MODEL_BYSTANDERS:
            yield f"models: {key}={json.dumps(value)} of {name} {version} is ignored."


def _model_settings(text: str) -> Iterator[tuple[str, str, str, object]]:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_MODELS_ALLOWED} ({error})") from error
    for name, versions in _members(parsed):
        for version, settings in _members(versions):
            for key, value in _members(settings):
                yield name, version, key, plain_number(value)


def plain_number(value: object) -> object:
    """The number that a JSON text or fraction stands for, where it does; else the value itself.

    TorchServe's reader of JSON did so, and programs that write such files rely on it.
    """
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _check_batching(key: str, value: object, whose: str) -> None:
    try:
        READERS[key](value)
    except ValueError as error:
        raise ValueError(f"{key} of {whose} to be {error}, it is {shown(value)}") from error


def _is_read(value: object, key: str) -> bool:
    if key == _MODEL_RUNTIME:
        return value in RUNTIMES
    if key in _MODEL_BATCHING or (key == "batchSize" and value == AUTOMATIC):
        return value is not None
    most = MOST_WORKERS if key == "minWorkers" else _MOST
    return key in _MODEL_NUMBERS and _is_count(value) and value <= most


def _members(value: object) -> Iterable[tuple[str, object]]:
    if isinstance(value, dict):
        return value.items()
    raise ValueError(_MODELS_ALLOWED)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
