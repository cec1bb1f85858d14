"""Finds the configuration file to read, and reads it.

As in TorchServe the newest snapshot wins over ``config.properties`` in the working directory.
Unlike there, it does not win over models of the command line, nor over a ``config.properties`` with
a catalog: it is ignored as a whole.

An incomplete snapshot, which a crash or a full disk leaves, is ignored with a warning: an empty
file would start a server without models. A complete snapshot with errors stops the start.

A file that is not UTF-8 is read in Latin-1, as Java does. The ``python=`` of TorchServe's snapshots
is ignored: our workers cannot run in its interpreter. Both cause a warning.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.properties import (
    ConfigError,
    Entry,
    parse_properties,
    read_entries,
)
from marserve.frontend.configuration.unread_keys import WITHOUT_EFFECT
from marserve.frontend.regular_files import read_file

#: The folder of snapshots, in the directory of the logs.
SNAPSHOT_FOLDER = "config"

#: The prefix of the version in our snapshots.
WRITTEN_BY = "marserve"

_WORKING_DIRECTORY_FILE = Path("config.properties")
_VARIABLE = re.compile(r"\$\$([^$]+)\$\$")


class Assignment(NamedTuple):
    """A key that was set."""

    text: str
    origin: str  # a file, "command line" or "environment"
    line: int = 0  # of the file; 0 for none

    @property
    def place(self) -> str:
        """The origin, with the line of a file."""
        return f"{self.origin}, line {self.line}" if self.line else self.origin


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file that was read, or no file."""

    path: Path | None = None  # as given
    raw: Mapping[str, str] = field(default_factory=dict)  # the texts of the file
    settings: Mapping[str, Assignment] = field(default_factory=dict)  # with ``$$NAME$$`` replaced
    warnings: tuple[str, ...] = ()  # about the choice, and about the file
    is_found: bool = False  # whether it is a snapshot that was not named
    passed_over: Path | None = None  # the snapshot that --models or a catalog replaces


def find_config_file(
    ts_config: str | None,
    environ: Mapping[str, str],
    snapshots: Path | None,
    *,
    names_models: bool = False,
) -> ConfigFile:
    """Choose and read the file.

    ``ts_config`` is the file of ``--ts-config``, ``snapshots`` the directory of snapshots, if they
    are read. If the command line ``names_models``, no snapshot is read.

    Raises:
        ConfigError: A file that was named is missing, or the chosen one cannot be read.
    """
    in_environment = environ.get("TS_CONFIG_FILE")
    if named := in_environment or ts_config:
        if not Path(named).is_file():
            by = "TS_CONFIG_FILE (environment):" if in_environment else "--ts-config"
            raise ConfigError(f"{by} file not found: {named}")
        return read_config_file(Path(named), environ)
    snapshot, damaged = newest_snapshot(snapshots) if snapshots else (None, [])
    file = ConfigFile()
    if _WORKING_DIRECTORY_FILE.is_file():
        file = read_config_file(_WORKING_DIRECTORY_FILE, environ)
    if snapshot and not names_models and not file.raw.get("model_catalog"):
        file = read_config_file(snapshot, environ)
        warnings = (*damaged, _why_snapshot(snapshot), *file.warnings)
        return replace(file, is_found=True, warnings=warnings)
    return replace(file, passed_over=snapshot, warnings=(*damaged, *file.warnings))


def newest_snapshot(directory: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete ``*.cfg``, and a warning for each newer one.

    Raises:
        ConfigError: A file cannot be read.
    """
    # Hidden ones are being written.
    found = [path for path in directory.glob("[!.]*.cfg") if path.is_file()]
    warnings: list[str] = []
    for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True):
        damage = _damage_of(path)
        if not damage:
            return path, warnings
        warnings.append(f"The snapshot {path.absolute()} is passed over: {damage}.")
    return None, warnings


def _damage_of(snapshot: Path) -> str:
    text, _ = _decoded(snapshot)
    if not text.strip("\0"):  # zeros only, after a loss of power
        return "it is empty"
    try:
        entries = parse_properties(text)
        json.loads(entries.get("model_snapshot", ""))
    except (ConfigError, ValueError, RecursionError):
        return "it ends too early"
    is_ended = text.endswith(("\n", "\r")) or [*entries][-1] == "model_snapshot"
    return "" if is_ended else "its last line is cut short"


def _why_snapshot(snapshot: Path) -> str:
    beaten = _WORKING_DIRECTORY_FILE.absolute()
    restored = f"are restored from the newest snapshot, {snapshot.absolute()}"
    if not beaten.is_file():
        return f"Configuration and models {restored}. Start with --ncs to ignore snapshots."
    return (
        f"Configuration and models {restored}, not from {beaten}: its changes have no effect. "
        "Start with --ncs, or --ts-config config.properties, to read it."
    )


def read_config_file(
    path: Path, environ: Mapping[str, str], content: bytes | None = None
) -> ConfigFile:
    """Read a file, or its ``content`` if given, and replace ``$$NAME$$`` from ``environ``.

    Raises:
        ConfigError: It cannot be read, or names a variable that is not set.
    """
    text, warnings = _decoded(path, content)
    try:
        written = read_entries(text)
    except ConfigError as error:
        raise ConfigError(f"{error} ({path})") from error
    entries: list[Entry] = []
    for entry in written:
        found = list(_split_glued(entry))
        if len(found) > 1:
            keys = ", ".join(setting.key for setting in found)
            warnings.append(
                f"{path}, line {entry.line}: between the settings {keys} a line break is missing; "
                "they are read as if it were there."
            )
        entries += found
    raw = {entry.key: entry.value for entry in entries}
    is_torchserves = "model_snapshot" in raw and not raw.get("version", "").startswith(WRITTEN_BY)
    settings = {
        key: Assignment(_replace_variables(value, environ), str(path), line)
        for key, value, line in entries
        if not (key == "python" and is_torchserves)
    }
    return ConfigFile(path, raw, settings, tuple(warnings))


def _decoded(path: Path, content: bytes | None = None) -> tuple[str, list[str]]:
    try:
        content = read_file(path) if content is None else content
    except OSError as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error}") from error
    try:
        return content.decode("utf-8-sig"), []
    except UnicodeDecodeError:
        return content.decode("latin-1"), [f"{path} is not UTF-8; it is read in Latin-1, as Java."]


def _split_glued(entry: Entry) -> Iterator[Entry]:
    """Yield the settings of an entry: itself, or those with a missing line break between them.

    SageMaker's toolkit appends to a file that does not end in one:
    ``enable_model_api=truedefault_response_timeout=60``. Only true, false and digits before a known
    key are split off: such a value cannot have a suffix.
    """
    while (match := _glued().fullmatch(entry.value)) and not _is_meant(entry):
        yield entry._replace(value=match[1])
        entry = Entry(match[2], match[3], entry.line)
    yield entry


@functools.cache
def _glued() -> re.Pattern[str]:
    keys = "|".join(
        sorted(map(re.escape, KEYS.keys() | WITHOUT_EFFECT.keys()), key=len, reverse=True)
    )
    return re.compile(rf"((?i:true|false)|[0-9]+)({keys})[ \t]*[=:][ \t]*(.*)", re.DOTALL)


def _is_meant(entry: Entry) -> bool:
    key = KEYS.get(entry.key)
    try:
        return key is not None and key.kind.from_text(entry.value) is not None
    except ValueError:
        return False


def _replace_variables(value: str, environ: Mapping[str, str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        try:
            return environ[match[1]]
        except KeyError:
            raise ConfigError(f"Invalid Environment Variable {match[1]}") from None

    return _VARIABLE.sub(replacement, value)
