"""Words for the levels of loggers: log4j's, Python's, and what they come to here."""

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

_SHOWN = ("debug", "info", "warn", "error", "fatal")


def level_word(level: int) -> str:
    """TorchServe's word for a level."""
    return next((word for word in _SHOWN if level <= LEVELS[word]), "off")
