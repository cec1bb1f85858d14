"""Logger names, files and formats: TorchServe's five files, and the console.

    logger                       file               console
    marserve, and every other    ts_log.log         yes
    MODEL_LOG                    model_log.log      yes
    ACCESS_LOG                   access_log.log     no
    TS_METRICS                   ts_metrics.log     no
    MODEL_METRICS                model_metrics.log  no

TorchServe puts all five on the console; that it is far too much is an old complaint. A file is
renamed at 100 MB and five old ones are kept; TorchServe's turn at midnight and its gzip are left
out.

Records are written where they are made, without a queue and a thread between: the server's own are
rare, and access lines arrive as one record per batch. A worker that prints without end slows the
event loop; that price buys lines that are on disk when a crash is looked into.
"""

import contextlib
import logging
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TextIO

_MAX_BYTES = 100 * 1024 * 1024
_OLD_FILES = 5
_LEVEL_WORDS = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # log4j's words, five letters at most


def log_directories(environ: Mapping[str, str] = os.environ) -> tuple[Path, Path]:
    """Returns the directories of the logs and of the metrics logs.

    The variables ``LOG_LOCATION`` and ``METRICS_LOCATION`` name them; both default to ``logs``.
    """
    return _directory(environ.get("LOG_LOCATION")), _directory(environ.get("METRICS_LOCATION"))


def _directory(location: str | None) -> Path:
    return Path(location or "logs")


def timestamp(epoch: float) -> str:
    """Formats seconds since the epoch as every log line shows them: local time, milliseconds."""
    seconds, milliseconds = divmod(int(epoch * 1000), 1000)
    return f"{_local_time(seconds)},{milliseconds:03d}"


@lru_cache(maxsize=16)
def _local_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


class _MetricFormatter(logging.Formatter):
    """``TIME - text``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s - %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802  logging's signature
        return timestamp(record.created)


class _LineFormatter(_MetricFormatter):
    """``TIME [LEVEL] thread logger - text``; a worker's output names the worker as its thread."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        level = _LEVEL_WORDS.get(record.levelname, record.levelname)
        thread = getattr(record, "worker", record.threadName)
        return f"{record.asctime} [{level:<5}] {thread} {record.name} - {record.message}"


def configure_logging(
    log_dir: Path,
    metrics_dir: Path,
    *,
    level: int = logging.INFO,
    console: TextIO | None = None,
) -> ExitStack:
    """Opens the log files and attaches them to their loggers.

    A record of ``MODEL_LOG`` names its worker with ``extra={"worker": ...}``. A record of
    ``ACCESS_LOG`` is written as it is: its lines are formatted before (see `timestamp`).

    Args:
        log_dir: Directory of the logs; made if it is not there.
        metrics_dir: Directory of the two metrics logs; made if it is not there.
        level: What the server's own loggers, ``marserve`` and below, let through.
        console: Where the console lines go; by default standard output.

    Returns:
        What was opened: its ``close()`` detaches and closes everything, in reverse order.

    Raises:
        OSError: A directory cannot be made, or a file not opened.
    """
    screen = logging.StreamHandler(console or sys.stdout)
    screen.setFormatter(_LineFormatter())
    with ExitStack() as opened:
        opened.callback(screen.close)

        def attach(
            name: str, file: Path, formatter: logging.Formatter, *others: logging.Handler
        ) -> None:
            handlers = [_open_file(opened, file, formatter), *others]
            _route(opened, logging.getLogger(name), handlers)

        attach("", log_dir / "ts_log.log", _LineFormatter(), screen)
        attach("MODEL_LOG", log_dir / "model_log.log", _LineFormatter(), screen)
        attach("ACCESS_LOG", log_dir / "access_log.log", logging.Formatter("%(message)s"))
        attach("TS_METRICS", metrics_dir / "ts_metrics.log", _MetricFormatter())
        attach("MODEL_METRICS", metrics_dir / "model_metrics.log", _MetricFormatter())
        _set_level(opened, logging.getLogger("marserve"), level)
        return opened.pop_all()


class _LogFile(RotatingFileHandler):
    """A log file whose full disk is no reason to stop serving: it is told once, not per record."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Called by logging when a record cannot be written."""
        if not self._told:
            self._told = True
            print(f"{self.baseFilename} cannot be written: {sys.exc_info()[1]}", file=sys.stderr)  # noqa: T201
        del record

    def close(self) -> None:
        """Close the file, written out or not."""
        with contextlib.suppress(OSError):
            super().close()


def _open_file(opened: ExitStack, path: Path, formatter: logging.Formatter) -> logging.Handler:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(
        path,
        maxBytes=_MAX_BYTES,
        backupCount=_OLD_FILES,
        encoding="utf-8",
        errors="backslashreplace",
    )
    opened.callback(handler.close)
    handler.setFormatter(formatter)
    return handler


def _route(opened: ExitStack, logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Sends a logger's records to these handlers only."""
    for handler in handlers:
        logger.addHandler(handler)
        opened.callback(logger.removeHandler, handler)
    if logger.name != "root":
        opened.callback(setattr, logger, "propagate", logger.propagate)
        logger.propagate = False
        _set_level(opened, logger, logging.INFO)


def _set_level(opened: ExitStack, logger: logging.Logger, level: int) -> None:
    opened.callback(logger.setLevel, logger.level)
    logger.setLevel(level)
