"""What the log says of a server that starts: one record with its surroundings and settings."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

from marserve.frontend.configuration.config import KEYS, Config
from marserve.frontend.logs.setup import log_directories
from marserve.frontend.version import __version__

_SECRETS = frozenset({"keystore_pass"})
_MAX_LENGTH = 500  # characters of a value


def banner(config: Config, *, gpus: int, cores: int, workdir: Path) -> str:
    """The surroundings, then every key of the configuration with the text that is in force.

    Args:
        config: The server's.
        gpus: How many GPUs will be used.
        cores: How many CPUs the server may use.
        workdir: Where archives are unpacked.
    """
    logs, metrics = (directory.absolute() for directory in log_directories())
    facts = {
        "Version": f"marserve {__version__}",
        "Home": Path(__file__).resolve().parent,
        "Current directory": Path.cwd(),
        "Temp directory": workdir,
        "Number of GPUs": gpus,
        "Number of CPUs": cores,
        "Python executable": f"{sys.executable} ({platform.python_version()})",
        "Process id": os.getpid(),
        "Log dir": logs,
        "Metrics dir": metrics,
        "Model API enabled": _word(config.model_api),
        "Token authorization": _word(config.token_authorization),
        **dict(_keys(config)),
    }
    lines = [f"{name}: {value}" for name, value in facts.items()]
    return "\n".join([f"marserve {__version__} starts.", *lines])


def _keys(config: Config) -> Iterator[tuple[str, str]]:
    for key in KEYS.values():
        text = config.texts.get(key.name, key.default)
        if text is not None:
            yield key.name, "***" if key.name in _SECRETS else _one_line(text)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_LENGTH else f"{line[:_MAX_LENGTH]}..."


def _word(switch: bool) -> str:
    return str(switch).lower()
