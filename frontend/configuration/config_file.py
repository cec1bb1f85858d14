"""Which configuration file is read, and what it says.

TorchServe's order, which has surprised many: the newest snapshot beats ``config.properties`` in the
working directory. So whoever starts a server is told which file was taken, and why.

Each snapshot of TorchServe's says ``python=`` and its own interpreter, which nobody chose; workers
of ours could not run there. In those files the key is passed over, and that is told too.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from marserve.frontend.configuration.properties import ConfigError, parse_properties

#: Where snapshots lie, in the directory of the logs.
SNAPSHOT_FOLDER = "config"

#: How the version in our own snapshots begins.
WRITTEN_BY = "marserve"

_WORKING_DIRECTORY_FILE = Path("config.properties")
_VARIABLE = re.compile(r"\$\$([^$]+)\$\$")


@dataclass(frozen=True)
class ConfigFile:
    """A configuration file that was read, or the absence of one.

    Attributes:
        path: As it was named; None where there is no file.
        raw: Keys and texts as they stand in it.
        texts: What counts of it, with variables put in for ``$$NAME$$``.
        surprise: What the operator should hear about the choice; empty for nothing.
    """

    path: Path | None = None
    raw: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    surprise: str = ""


def find_config_file(
    ts_config: str | None, environ: Mapping[str, str], snapshots: Path | None
) -> ConfigFile:
    """Chooses and reads the file.

    Args:
        ts_config: The file named by ``--ts-config``; ``TS_CONFIG_FILE`` beats it.
        environ: The environment.
        snapshots: Directory whose newest snapshot beats ``config.properties`` in the working
            directory; None for no snapshots.

    Raises:
        ConfigError: A file that was named is missing, or the chosen one cannot be read.
    """
    named = environ.get("TS_CONFIG_FILE") or ts_config
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"--ts-config file not found: {named}")
        return _read(Path(named), environ)
    snapshot = newest_snapshot(snapshots) if snapshots else None
    if snapshot:
        return _read(snapshot, environ, _surprise(snapshot))
    if _WORKING_DIRECTORY_FILE.is_file():
        return _read(_WORKING_DIRECTORY_FILE, environ)
    return ConfigFile()


def newest_snapshot(directory: Path) -> Path | None:
    """The ``*.cfg`` that was written last, if there is any."""
    # Hidden ones are being written.
    found = [path for path in directory.glob("[!.]*.cfg") if path.is_file()]
    return max(found, key=lambda path: (path.stat().st_mtime_ns, path.name), default=None)


def _surprise(snapshot: Path) -> str:
    beaten = _WORKING_DIRECTORY_FILE.absolute()
    instead = f", not from {beaten}" if beaten.is_file() else ""
    return (
        f"Configuration and models are restored from the newest snapshot, {snapshot.absolute()}"
        f"{instead}. Start with --ncs to leave snapshots alone."
    )


def _read(path: Path, environ: Mapping[str, str], surprise: str = "") -> ConfigFile:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Cannot read the configuration file {path}: {error}") from error
    raw = parse_properties(text)
    texts = {
        name: _replace_variables(value, environ)
        for name, value in raw.items()
        if not (name == "python" and _is_torchserves(raw))
    }
    return ConfigFile(path, raw, texts, surprise)


def _is_torchserves(raw: Mapping[str, str]) -> bool:
    """Whether TorchServe wrote it, as a snapshot."""
    return "model_snapshot" in raw and not raw.get("version", "").startswith(WRITTEN_BY)


def _replace_variables(value: str, environ: Mapping[str, str]) -> str:
    def replacement(match: re.Match[str]) -> str:
        try:
            return environ[match[1]]
        except KeyError:
            raise ConfigError(f"Invalid Environment Variable {match[1]}") from None

    return _VARIABLE.sub(replacement, value)
