"""Logger names, files and formats: TorchServe's five files, and the console.

    logger                       file               console
    marserve, and every other    ts_log.log         yes
    MODEL_LOG                    model_log.log      yes
    ACCESS_LOG                   access_log.log     no
    TS_METRICS                   ts_metrics.log     no
    MODEL_METRICS                model_metrics.log  no

TorchServe puts all five on the console, which is far too much. Records with `DETAIL` do not go
there either, unless the console is verbose. A file is turned at midnight and at 100 MB, and five
old ones are kept, compressed (`files`). Levels can be changed while the server runs (`levels`), and
``--log-config`` can change everything (`config`).

Records are written where they are made, so that they are on disk after a crash: the server's own
are rare, and access lines and metrics come as one record for many lines; only a worker that prints
without end slows the event loop. With ``async_logging`` a thread writes.
"""

import io
import logging
import os
import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from logging.handlers import QueueHandler
from pathlib import Path
from typing import TextIO

from marserve.frontend.logs.files import LogFile
from marserve.frontend.logs.formats import JsonFormatter, LineFormatter
from marserve.frontend.logs.levels import OF_FILES, SERVER, find_logger, set_level

#: For ``extra=`` of a record that only the file needs.
DETAIL = {"is_detail": True}
# A thread that is so far behind is waited for.
_MAX_RECORDS_WAITING = 100_000
# syslog's, of the levels that are used.
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: 3, logging.WARNING: 4, logging.INFO: 6}
_DEBUG = 7


def log_directories(environ: Mapping[str, str] = os.environ) -> tuple[Path, Path]:
    """The directories of the logs and of the metrics logs; both default to ``logs``."""
    logs, metrics = environ.get("LOG_LOCATION"), environ.get("METRICS_LOCATION")
    return Path(logs or "logs"), Path(metrics or "logs")


def explain_unwritable(error: OSError, environ: Mapping[str, str] = os.environ) -> str:
    """Why the logs cannot be written: which path, and which variable decides about it."""
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
    asynchronous: bool = False,
    verbose: bool = False,
    console: TextIO | None = None,
) -> ExitStack:
    """Open the log files, in directories that are made, and attach them to their loggers.

    A record of ``MODEL_LOG`` names its worker with ``extra={"worker": ...}``. Records of
    ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are written as they are. An
    ``asynchronous`` log is written by a thread; a ``verbose`` console shows details. Closing what
    is returned undoes it all.

    Raises:
        OSError: A directory cannot be made, or a file not opened.
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
        plan = {
            "root": [add(LogFile(log_dir / "ts_log.log"), formatter), screen],
            "MODEL_LOG": [add(LogFile(log_dir / "model_log.log"), formatter), screen],
            "ACCESS_LOG": [add(LogFile(log_dir / "access_log.log"), finished)],
            "TS_METRICS": [add(LogFile(metrics_dir / "ts_metrics.log"), finished)],
            "MODEL_METRICS": [add(LogFile(metrics_dir / "model_metrics.log"), finished)],
        }
        writer = Writer(opened) if asynchronous else None
        remember_loggers(opened)
        for name, handlers in plan.items():
            is_root = name == "root"
            chosen = handlers if writer is None else [writer.before(handlers)]
            attach(name, chosen, None if is_root else logging.INFO, propagate=is_root)
        set_level(SERVER, logging.INFO)
        return opened.pop_all()


def attach(
    name: str,
    handlers: Iterable[logging.Handler],
    level: int | None = None,
    *,
    propagate: bool = True,
) -> None:
    """Give a logger more handlers, and a level unless that is None."""
    logger = find_logger(name)
    for handler in handlers:
        logger.addHandler(handler)
    logger.propagate = propagate
    if level is not None:
        logger.setLevel(level)


def remember_loggers(opened: ExitStack, more: Iterable[str] = ()) -> None:
    """Have closing restore the loggers, and close the handlers that they get meanwhile."""
    for name in dict.fromkeys((*OF_FILES, *more)):
        logger = find_logger(name)
        opened.callback(_restore, logger, logger.level, logger.propagate, list(logger.handlers))


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
    """Open the files anew, which another program may have moved.

    Raises:
        OSError: One of them cannot be opened.
    """
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(item for item in named if isinstance(item, logging.Logger))]
    handlers = (handler for logger in loggers for handler in logger.handlers)
    for file in {file for handler in handlers for file in _files(handler)}:
        file.reopen()


def _files(handler: logging.Handler) -> Iterator[LogFile]:
    """The files that a handler writes to, itself or by others."""
    if isinstance(handler, LogFile):
        yield handler
    for target in getattr(handler, "targets", ()):
        yield from _files(target)


class Console(logging.StreamHandler[TextIO]):
    """Writes records to a terminal or a pipe, whose reader may leave, as ``head`` does.

    systemd's journal takes each line as a record, with the priority that stands before it.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._is_journal = is_journal(stream)

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        text = super().format(record)
        if not self._is_journal:
            return text
        prefix = f"<{_PRIORITIES.get(record.levelno, _DEBUG)}>"
        return "\n".join([f"{prefix}{line}" for line in text.split("\n")])

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Called when a record cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def is_journal(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether what is written to a stream goes to systemd's journal, which then says so."""
    try:
        status = os.fstat(stream.fileno())
    except (OSError, ValueError):  # it has no descriptor
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


def hide_details(console: logging.Handler) -> None:
    """Keep records with `DETAIL` from a console."""
    console.addFilter(lambda record: not hasattr(record, "is_detail"))


def standard_output() -> TextIO:
    """Standard output; what its encoding lacks becomes a code rather than an error."""
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


_Records = queue.Queue[tuple[Forward, logging.LogRecord] | None]


class Writer:
    """A thread that passes records to their handlers, in order, until ``opened`` is closed."""

    def __init__(self, opened: ExitStack) -> None:
        self._records: _Records = queue.Queue(_MAX_RECORDS_WAITING)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        opened.callback(self._end)

    def before(self, handlers: list[logging.Handler]) -> logging.Handler:
        """A handler by which the thread writes to others."""
        return _Later(self._records, handlers)

    def _run(self) -> None:
        while (item := self._records.get()) is not None:
            handler, record = item
            handler.emit(record)

    def _end(self) -> None:
        self._records.put(None)
        self._thread.join()


class _Later(QueueHandler):
    def __init__(self, records: _Records, targets: list[logging.Handler]) -> None:
        super().__init__(records)
        self.targets = targets
        self._records = records
        self._forward = Forward(targets)

    def enqueue(self, record: logging.LogRecord) -> None:
        self._records.put((self._forward, record))
