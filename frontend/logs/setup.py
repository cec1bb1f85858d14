"""The loggers, files and formats of TorchServe, the console, and how logging is configured.

    logger                       file               console
    marserve, and every other    ts_log.log         yes
    MODEL_LOG                    model_log.log      yes
    ACCESS_LOG                   access_log.log     no
    TS_METRICS                   ts_metrics.log     no
    MODEL_METRICS                model_metrics.log  no

A file is rolled over at midnight and at 100 MB, and five old ones are kept, compressed (`files`).
``--log-config`` replaces all of this (`config`).

Threads write (`writers`): no record makes the event loop wait for a disk or for who reads the
console. Access lines, metrics and the output of workers come as one record for many lines.
"""

import io
import logging
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from logging.config import DictConfigurator
from pathlib import Path
from typing import Any, TextIO

from marserve.frontend.logs.files import LogFile
from marserve.frontend.logs.formats import JsonFormatter, LineFormatter
from marserve.frontend.logs.levels import OF_FILES, SERVER
from marserve.frontend.logs.writers import LogWriter, OfRecords, end_writers

#: For ``extra=`` of a record that only the file and a verbose console need.
DETAIL = {"is_detail": True}
# Priorities of syslog(3) by level; 7 for others.
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}


def log_directories(environ: Mapping[str, str] = os.environ) -> tuple[Path, Path]:
    """Return the directories of the logs and of the metrics logs; both default to ``logs``."""
    logs, metrics = environ.get("LOG_LOCATION"), environ.get("METRICS_LOCATION")
    return Path(logs or "logs"), Path(metrics or "logs")


def explain_unwritable(error: OSError, environ: Mapping[str, str] = os.environ) -> str:
    """Return why the logs cannot be written: the path, and the variable that decides about it."""
    if not isinstance(error.filename, str):
        return f"The logs cannot be written: {error}."
    path = Path(error.filename).absolute()
    text = f"The logs cannot be written: {path}: {error.strerror}."
    logs, metrics = (directory.absolute() for directory in log_directories(environ))
    if not any(path.is_relative_to(each) or each.is_relative_to(path) for each in (logs, metrics)):
        return text  # a file of --log-config
    is_metrics = path.is_relative_to(metrics) and not path.is_relative_to(logs)
    variable = "METRICS_LOCATION" if is_metrics else "LOG_LOCATION"
    return f"{text} Set {variable} to a directory in which this user may write."


def usual_dictionary(log_dir: Path, metrics_dir: Path, *, as_json: bool) -> dict[str, Any]:
    """Return the configuration of the usual files, as `logging.config.dictConfig` takes it.

    A record of ``MODEL_LOG`` names its worker with ``extra={"worker": ...}``. Records of
    ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are written as they are, the others
    ``as_json`` or as text.
    """

    def file(directory: Path, name: str, formatter: str = "finished") -> dict[str, Any]:
        return {"()": LogFile, "path": directory / f"{name}.log", "formatter": formatter}

    def logger(*handlers: str) -> dict[str, Any]:
        return {"level": logging.INFO, "propagate": False, "handlers": handlers}

    return {
        "formatters": {
            "text": {"()": JsonFormatter if as_json else LineFormatter},
            "finished": {"format": "%(message)s"},
        },
        "handlers": {
            "console": {"()": Console, "formatter": "text"},
            "ts_log": file(log_dir, "ts_log", "text"),
            "model_log": file(log_dir, "model_log", "text"),
            "access_log": file(log_dir, "access_log"),
            "ts_metrics": file(metrics_dir, "ts_metrics"),
            "model_metrics": file(metrics_dir, "model_metrics"),
        },
        "loggers": {
            "root": {"handlers": ["ts_log", "console"]},
            SERVER: {"level": logging.INFO},
            "MODEL_LOG": logger("model_log", "console"),
            "ACCESS_LOG": logger("access_log"),
            "TS_METRICS": logger("ts_metrics"),
            "MODEL_METRICS": logger("model_metrics"),
        },
    }


def apply_dictionary(dictionary: dict[str, Any], *, verbose: bool) -> ExitStack:
    """Configure logging as `dictConfig` does, with a thread for each handler; closing undoes it.

    Loggers that the dictionary does not name stay enabled by default. A console shows records with
    `DETAIL` if it is ``verbose``. Raises OSError if a file cannot be opened, and the errors of
    `dictConfig`.
    """
    names = (*OF_FILES, *dictionary.get("loggers", ()))
    loggers = dict.fromkeys(map(logging.getLogger, names))  # "" and "root" are one
    defaults = {"version": 1, "disable_existing_loggers": False}
    configurator = DictConfigurator(defaults | dictionary)
    with ExitStack() as opened:
        for each in loggers:
            opened.callback(_restore, each, each.level, each.propagate, list(each.handlers))
        opened.callback(end_writers)
        try:
            configurator.configure()
        except Exception as error:
            handlers = configurator.config.get("handlers")
            for each in handlers.values() if isinstance(handlers, dict) else ():
                if isinstance(each, logging.Handler):
                    each.close()
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.filename is not None:
                raise cause from None
            raise
        writers: dict[logging.Handler, LogWriter] = {}
        for each in loggers:
            for at, handler in enumerate(each.handlers):
                if handler not in writers:
                    if isinstance(handler, Console) and not verbose:
                        handler.addFilter(_WithoutDetails())
                    writers[handler] = LogWriter(handler)
                each.handlers[at] = writers[handler]
        return opened.pop_all()


def _restore(
    logger: logging.Logger, level: int, propagate: bool, handlers: list[logging.Handler]
) -> None:
    logger.setLevel(level)
    logger.propagate = propagate
    for handler in logger.handlers[:]:
        if handler not in handlers:
            logger.removeHandler(handler)
            handler.close()
    for handler in handlers:
        logger.addHandler(handler)


def reopen_log_files() -> None:
    """Open all files again, which another program may have moved; raises the first OSError."""
    failures = list[OSError]()
    for file in log_files():
        try:
            file.reopen()
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def log_files() -> list[LogFile]:
    """Return the open files, that of the root logger first."""
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(item for item in named if isinstance(item, logging.Logger))]
    handlers = [handler for logger in loggers for handler in logger.handlers]
    targets = [each.target if isinstance(each, LogWriter) else each for each in handlers]
    return list(dict.fromkeys(each for each in targets if isinstance(each, LogFile)))


class Console(logging.StreamHandler[TextIO]):
    """Writes records to a terminal or a pipe, whose reader may end, as ``head`` does.

    The default is standard output. A line of systemd's journal is a record, with its priority in
    front of it.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or _standard_output())
        self._is_journal = is_journal(self.stream)

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        text = super().format(record)
        if not self._is_journal:
            return text
        prefix = f"<{_PRIORITIES.get(record.levelno, 7)}>"
        return "\n".join([f"{prefix}{line}" for line in text.split("\n")])

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Called when a record cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def is_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a stream is connected to systemd's journal, by ``JOURNAL_STREAM``."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # it has no descriptor
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class _WithoutDetails(OfRecords):
    def filter(self, record: logging.LogRecord) -> bool:
        return not hasattr(record, "is_detail")


def _standard_output() -> TextIO:
    """Return standard output, with escapes for what its encoding lacks instead of errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout
