"""The levels of loggers, which are seen and changed while the server runs, and words for them."""

import logging
from collections.abc import Mapping

#: Above every level: nothing gets through.
OFF = logging.CRITICAL + 10
#: What is below DEBUG shows no more than DEBUG.
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
#: Loggers whose records are finished lines, several in one record (`formats`).
LINES = ("ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
#: Those that have files, `SERVER` being what the root logger's is for.
OF_FILES = ("root", SERVER, "MODEL_LOG", *LINES)

_WORDS = ("debug", "info", "warn", "error", "fatal")


def find_logger(name: str) -> logging.Logger:
    """The logger of a name, which is ``root`` for the one above all others."""
    return logging.getLogger("" if name == "root" else name)


def level_word(level: int) -> str:
    """TorchServe's word for a level."""
    return next((word for word in _WORDS if level <= LEVELS[word]), "off")


def logger_levels() -> dict[str, int]:
    """The level in force of those of TorchServe's files, then of the parts of the server."""
    parts = sorted(
        name
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(f"{SERVER}.")
    )
    return {name: find_logger(name).getEffectiveLevel() for name in (*OF_FILES, *parts)}


def set_level(name: str, level: int) -> None:
    """Set what a logger lets through; with ``logging.NOTSET``, what its parent does."""
    find_logger(name).setLevel(level)
