"""Levels of loggers, which can be read and changed while the server runs, and their names."""

import logging
from collections.abc import Mapping

#: Above every level: the logger writes nothing.
OFF = logging.CRITICAL + 10
#: Levels by name. Python has nothing below DEBUG.
LEVELS: Mapping[str, int] = {
    "all": logging.DEBUG,
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
    "critical": logging.CRITICAL,
    "off": OFF,
}
SERVER = "marserve"
#: Loggers of finished lines: one record contains several (`formats.log_entries`).
LINES = ("ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
#: Loggers with files. The file of ``root`` also contains the records of `SERVER`.
OF_FILES = ("root", SERVER, "MODEL_LOG", *LINES)

_NAMES = ("debug", "info", "warn", "error", "fatal")


def level_word(level: int) -> str:
    """Return TorchServe's name of a level."""
    return next((name for name in _NAMES if level <= LEVELS[name]), "off")


def logger_levels() -> dict[str, int]:
    """Return the effective levels of the loggers with files, then of the server's modules."""
    modules = sorted(
        name
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(f"{SERVER}.")
    )
    return {name: logging.getLogger(name).getEffectiveLevel() for name in (*OF_FILES, *modules)}
