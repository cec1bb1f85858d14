"""The loggers, files and formats of TorchServe, and the console.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from marserve.frontend.logs.files import LogFile
from marserve.frontend.logs.formats import JsonFormatter, LineFormatter
from marserve.frontend.logs.levels import OF_FILES, SERVER, find_logger
from marserve.frontend.logs.writers import LogWriter, OfRecords, Threads, end_writers

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


def configure_logging(
    log_dir: Path,
    metrics_dir: Path,
    *,
    as_json: bool = False,
    verbose: bool = False,
    console: TextIO | None = None,
) -> ExitStack:
    """Open the log files and attach them to their loggers; closing the result undoes everything.

    A record of ``MODEL_LOG`` names its worker with ``extra={"worker": ...}``. Records of
    ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are written as they are, the others
    ``as_json`` or as text.
    """
    formatter = JsonFormatter() if as_json else LineFormatter()
    finished = logging.Formatter("%(message)s")
    with ExitStack() as opened:

        def add(handler: logging.Handler, layout: logging.Formatter) -> logging.Handler:
            handler.setFormatter(layout)
            opened.callback(handler.close)
            return handler

        screen = add(Console(console or standard_output()), formatter)
        if not verbose:
            hide_details(screen)
        for directory in (log_dir, metrics_dir):
            directory.mkdir(parents=True, exist_ok=True)
        plan = [
            LoggerSetup("root", [add(LogFile(log_dir / "ts_log.log"), formatter), screen]),
            LoggerSetup(SERVER, level=logging.INFO),
        ]
        for name, directory, handlers in (
            ("MODEL_LOG", log_dir, [screen]),
            ("ACCESS_LOG", log_dir, []),
            ("TS_METRICS", metrics_dir, []),
            ("MODEL_METRICS", metrics_dir, []),
        ):
            file = add(
                LogFile(directory / f"{name.lower()}.log"), formatter if handlers else finished
            )
            plan.append(LoggerSetup(name, [file, *handlers], logging.INFO, propagate=False))
        set_up_loggers(plan, opened)
        return opened.pop_all()


@dataclass(frozen=True)
class LoggerSetup:
    """The handlers that a logger gets, and its level; None does not change it."""

    name: str
    handlers: Sequence[logging.Handler] = ()
    level: int | None = None
    propagate: bool = True


def set_up_loggers(plan: Sequence[LoggerSetup], opened: ExitStack) -> None:
    """Set up loggers until ``opened`` is closed; their handlers are given threads."""
    restore_loggers(opened, (each.name for each in plan))
    threads = Threads()
    for each in plan:
        logger = find_logger(each.name)
        for handler in each.handlers:
            logger.addHandler(threads.writer_of(handler))
        logger.propagate = each.propagate
        if each.level is not None:
            logger.setLevel(each.level)


def restore_loggers(opened: ExitStack, more: Iterable[str] = ()) -> None:
    """Have closing ``opened`` restore the loggers and close the handlers that they got."""
    for name in dict.fromkeys((*OF_FILES, *more)):
        logger = find_logger(name)
        opened.callback(_restore, logger, logger.level, logger.propagate, list(logger.handlers))
    opened.callback(end_writers)


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


def write_in_threads() -> None:
    """Give each handler of all loggers a thread."""
    threads = Threads()
    for logger in _loggers():
        logger.handlers[:] = map(threads.writer_of, logger.handlers)


def log_files() -> list[LogFile]:
    """Return the open files, that of the root logger first."""
    handlers = (handler for logger in _loggers() for handler in logger.handlers)
    return list(dict.fromkeys(file for handler in handlers for file in _files(handler)))


def _loggers() -> list[logging.Logger]:
    named = logging.root.manager.loggerDict.values()
    return [logging.root, *(item for item in named if isinstance(item, logging.Logger))]


def _files(handler: logging.Handler) -> Iterator[LogFile]:
    if isinstance(handler, LogWriter):
        handler = handler.target
    if isinstance(handler, LogFile):
        yield handler
    for target in getattr(handler, "targets", ()):
        yield from _files(target)


class Console(logging.StreamHandler[TextIO]):
    """Writes records to a terminal or a pipe, whose reader may end, as ``head`` does.

    A line of systemd's journal is a record, with its priority in front of it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_journal = is_journal(stream)

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


def hide_details(console: logging.Handler) -> None:
    """Keep records with `DETAIL` from a console."""
    console.addFilter(_WithoutDetails())


class _WithoutDetails(OfRecords):
    def filter(self, record: logging.LogRecord) -> bool:
        return not hasattr(record, "is_detail")


def standard_output() -> TextIO:
    """Return standard output, with escapes for what its encoding lacks instead of errors."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


class Forward(logging.Handler):
    """Passes records of at least a level to other handlers."""

    def __init__(self, targets: list[logging.Handler], level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self.targets = targets

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with each record."""
        for target in self.targets:
            if record.levelno >= target.level:
                target.handle(record)
