"""Logger names, files and formats: TorchServe's five files, and the console.

    logger                       file               console
    marserve, and every other    ts_log.log         yes
    MODEL_LOG                    model_log.log      yes
    ACCESS_LOG                   access_log.log     no
    TS_METRICS                   ts_metrics.log     no
    MODEL_METRICS                model_metrics.log  no

TorchServe puts all five on the console; that it is far too much is an old complaint. Records with
`DETAIL` are not shown there either, unless somebody wants to see everything. A file is
turned at midnight and at 100 MB, and five old ones are kept, compressed (`log_files`). Levels can
be changed while the server runs, and ``--log-config`` can change everything (`log_config`).

Records are written where they are made: the server's own are rare, and access lines and metrics
arrive as one record for many lines. A worker that prints without end slows the event loop; that
price buys lines that are on disk when a crash is looked into. ``async_logging`` decides otherwise:
a thread writes, and a crash costs what it has not written yet.
"""

import io
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import lru_cache
from logging.handlers import QueueHandler
from pathlib import Path
from typing import TextIO

from marserve.frontend.logs.files import LogFile

#: Loggers whose records are finished lines, several in one record.
_LINES = ("ACCESS_LOG", "TS_METRICS", "MODEL_METRICS")
#: For ``extra=`` of a record that only the file needs.
DETAIL = {"is_detail": True}
_SERVER = "marserve"
_LEVEL_WORDS = {"WARNING": "WARN", "CRITICAL": "FATAL"}  # log4j's words, five letters at most
_THREAD_WORDS = {"MainThread": "main"}
# A thread that cannot keep up with so much is waited for.
_MOST_RECORDS_WAITING = 100_000


def log_directories(environ: Mapping[str, str] = os.environ) -> tuple[Path, Path]:
    """Returns the directories of the logs and of the metrics logs.

    The variables ``LOG_LOCATION`` and ``METRICS_LOCATION`` name them; both default to ``logs``.
    """
    return _directory(environ.get("LOG_LOCATION")), _directory(environ.get("METRICS_LOCATION"))


def _directory(location: str | None) -> Path:
    return Path(location or "logs")


def explain_unwritable(error: OSError, environ: Mapping[str, str] = os.environ) -> str:
    """Returns why the logs cannot be written: where that is, and what decides where they are."""
    if not isinstance(error.filename, str):
        return f"The logs cannot be written: {error}."
    path = Path(error.filename).absolute()
    logs, metrics = (directory.absolute() for directory in log_directories(environ))
    if not any(
        path == one or one in path.parents or path in one.parents for one in (logs, metrics)
    ):
        return f"The logs cannot be written: {path}: {error.strerror}."  # a file of --log-config
    is_metrics = path.is_relative_to(metrics) and not path.is_relative_to(logs)
    variable = "METRICS_LOCATION" if is_metrics else "LOG_LOCATION"
    return (
        f"The logs cannot be written: {path}: {error.strerror}. "
        f"Set {variable} to a directory in which this user may write."
    )


def timestamp(epoch: float) -> str:
    """Formats seconds since the epoch as every log line shows them: local time, milliseconds."""
    return _local_time_ms(int(epoch * 1000))


@lru_cache(maxsize=4)  # many lines are of the same moment
def _local_time_ms(epoch_ms: int) -> str:
    seconds, milliseconds = divmod(epoch_ms, 1000)
    return f"{_local_time(seconds)},{milliseconds:03d}"


@lru_cache(maxsize=16)
def _local_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(seconds))


def one_line(text: object) -> str:
    """Makes what a stranger sent fit for a log line: nobody else starts one, or rings a bell."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in str(text))


class LineFormatter(logging.Formatter):
    """``TIME [LEVEL] thread logger - text``; a worker's output names the worker as its thread."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802  logging's signature
        """Called by logging."""
        return timestamp(record.created)

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Called by logging."""
        level, thread = level_and_thread(record)
        return f"{record.asctime} [{level:<5}] {thread} {record.name} - {record.message}"


class JsonFormatter(logging.Formatter):
    """The same as one JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Called by logging."""
        level, thread = level_and_thread(record)
        members = {
            "time": timestamp(record.created),
            "level": level,
            "thread": thread,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        return json.dumps(members, ensure_ascii=False)


def level_and_thread(record: logging.LogRecord) -> tuple[str, str]:
    """log4j's word for the level of a record, and the name of its thread or worker."""
    level = _LEVEL_WORDS.get(record.levelname, record.levelname)
    thread = getattr(record, "worker", record.threadName) or ""
    return level, _THREAD_WORDS.get(thread, thread)


def configure_logging(
    log_dir: Path,
    metrics_dir: Path,
    *,
    as_json: bool = False,
    asynchronous: bool = False,
    verbose: bool = False,
    console: TextIO | None = None,
) -> ExitStack:
    """Opens the log files and attaches them to their loggers.

    A record of ``MODEL_LOG`` names its worker with ``extra={"worker": ...}``. Records of
    ``ACCESS_LOG``, ``TS_METRICS`` and ``MODEL_METRICS`` are written as they are: their lines are
    formatted before (see `timestamp`).

    Args:
        log_dir: Directory of the logs; made if it is not there.
        metrics_dir: Directory of the two metrics logs; made if it is not there.
        as_json: Whether records are JSON objects.
        asynchronous: Whether a thread writes them.
        verbose: Whether the console shows details.
        console: Where the console lines go; by default standard output.

    Returns:
        What was opened: its ``close()`` detaches and closes everything, in reverse order.

    Raises:
        OSError: A directory cannot be made, or a file not opened.
    """
    formatter = JsonFormatter() if as_json else LineFormatter()
    with ExitStack() as opened:
        screen = _open_console(opened, formatter, console, verbose=verbose)
        plan = _open_all(opened, log_dir, metrics_dir, formatter, screen)
        writer = Writer(opened) if asynchronous else None
        remember_loggers(opened)
        for name, handlers in plan.items():
            _route(_logger(name), handlers if writer is None else [writer.before(handlers)])
        set_level(_SERVER, logging.INFO)
        return opened.pop_all()


def remember_loggers(opened: ExitStack, more: Iterable[str] = ()) -> None:
    """Have the loggers put back the way they are now; what they get meanwhile is closed."""
    for name in dict.fromkeys(("root", _SERVER, "MODEL_LOG", *_LINES, *more)):
        logger = _logger(name)
        opened.callback(_put_back, logger, logger.level, logger.propagate, list(logger.handlers))


def logger_levels() -> dict[str, int]:
    """Every logger that can be told a level, with the level in force: those of TorchServe's files
    first, then the parts of the server.
    """  # noqa: D205 - one sentence
    parts = sorted(
        name
        for name, one in logging.root.manager.loggerDict.items()
        if isinstance(one, logging.Logger) and name.startswith(f"{_SERVER}.")
    )
    names = ["root", _SERVER, "MODEL_LOG", *_LINES, *parts]
    return {name: _logger(name).getEffectiveLevel() for name in names}


def reopen_log_files() -> None:
    """Open the files anew, which another program may have moved.

    Raises:
        OSError: One of them cannot be opened.
    """
    named = logging.root.manager.loggerDict.values()
    loggers = [logging.root, *(one for one in named if isinstance(one, logging.Logger))]
    for file in {file for one in loggers for handler in one.handlers for file in _files(handler)}:
        file.reopen()


def _files(handler: logging.Handler) -> Iterator[LogFile]:
    """The files that a handler writes to, itself or by others."""
    if isinstance(handler, LogFile):
        yield handler
    for target in getattr(handler, "targets", ()):
        yield from _files(target)


class Console(logging.StreamHandler[TextIO]):
    """Writes records to a terminal, or to what stands in its place.

    Whoever reads it may leave, as ``head`` does: then what it missed is in the files, and is not
    told anew for each record.
    """

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  logging's name
        """Called when a record cannot be written."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def hide_details(console: logging.Handler) -> None:
    """Keep records with `DETAIL` from a console."""
    console.addFilter(lambda record: not hasattr(record, "is_detail"))


def attach(
    name: str, handlers: Iterable[logging.Handler], level: int | None, *, propagate: bool
) -> None:
    """Give a logger handlers.

    Args:
        name: Its name.
        handlers: In addition to what it has.
        level: What it lets through; None for what its parent does.
        propagate: Whether its parents' handlers get its records, too.
    """
    logger = _logger(name)
    for handler in handlers:
        logger.addHandler(handler)
    logger.propagate = propagate
    if level is not None:
        logger.setLevel(level)


def set_level(name: str, level: int) -> None:
    """Set what a logger lets through; with ``logging.NOTSET``, what its parent does."""
    _logger(name).setLevel(level)


def _open_all(
    opened: ExitStack,
    log_dir: Path,
    metrics_dir: Path,
    formatter: logging.Formatter,
    screen: logging.Handler,
) -> dict[str, list[logging.Handler]]:
    """The handlers of each logger, by its name."""
    for directory in (log_dir, metrics_dir):
        directory.mkdir(parents=True, exist_ok=True)
    plain = logging.Formatter("%(message)s")

    def file(path: Path, of_file: logging.Formatter) -> logging.Handler:
        handler = LogFile(path)
        opened.callback(handler.close)
        handler.setFormatter(of_file)
        return handler

    return {
        "root": [file(log_dir / "ts_log.log", formatter), screen],
        "MODEL_LOG": [file(log_dir / "model_log.log", formatter), screen],
        "ACCESS_LOG": [file(log_dir / "access_log.log", plain)],
        "TS_METRICS": [file(metrics_dir / "ts_metrics.log", plain)],
        "MODEL_METRICS": [file(metrics_dir / "model_metrics.log", plain)],
    }


def _open_console(
    opened: ExitStack, formatter: logging.Formatter, console: TextIO | None, *, verbose: bool
) -> logging.Handler:
    screen: logging.Handler = Console(console or standard_output())
    screen.setFormatter(formatter)
    if not verbose:
        hide_details(screen)
    opened.callback(screen.close)
    return screen


def standard_output() -> TextIO:
    """Standard output, told to show what its encoding lacks by a code rather than to fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def _route(logger: logging.Logger, handlers: list[logging.Handler]) -> None:
    """Sends a logger's records to these handlers only."""
    for handler in handlers:
        logger.addHandler(handler)
    if logger is not logging.root:
        logger.propagate = False
        logger.setLevel(logging.INFO)


def _logger(name: str) -> logging.Logger:
    return logging.getLogger("" if name == "root" else name)


def _put_back(
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


class Writer:
    """A thread that hands records on to the handlers they are for, in order.

    Args:
        opened: Where its end is noted.
    """

    def __init__(self, opened: ExitStack) -> None:
        self._records: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_RECORDS_WAITING)
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()
        opened.callback(self._end)

    def before(self, handlers: list[logging.Handler]) -> logging.Handler:
        """Make the handler that stands before others."""
        return _Later(self._records, handlers)

    def _run(self) -> None:
        while (write := self._records.get()) is not None:
            write()

    def _end(self) -> None:
        self._records.put(None)
        self._thread.join()


class _Later(QueueHandler):
    def __init__(
        self, records: "queue.Queue[Callable[[], None] | None]", handlers: list[logging.Handler]
    ) -> None:
        super().__init__(records)
        self._records = records
        self.targets = handlers

    def enqueue(self, record: logging.LogRecord) -> None:
        def write() -> None:
            for handler in self.targets:
                if record.levelno >= handler.level:
                    handler.handle(record)

        self._records.put(write)
