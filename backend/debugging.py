"""Serves a handler that is debugged: it has the terminal, and changed files are loaded again.

``breakpoint()`` reads from the terminal of the server, because this process stays in the session
and the group of the server. Ctrl-C therefore reaches both, and the server leaves it to the worker:
at a prompt it clears the line, in the handler it raises KeyboardInterrupt, and between two requests
the worker stops the server.
"""

import asyncio
import functools
import gc
import importlib
import json
import linecache
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from marserve.backend.async_worker import new_loop
from marserve.backend.batch_run import Send, failure_reply
from marserve.backend.connection import FrontendConnection
from marserve.backend.errors import HANDLER_LOG, sentence_of
from marserve.backend.loader import load_service
from marserve.backend.protocol import (
    Compare,
    Compared,
    EndSequence,
    Load,
    Loaded,
    Predict,
    Prediction,
    Profile,
    Profiled,
    Reply,
)
from marserve.backend.service import Service

logger = logging.getLogger(__name__)
_handler_logger = logging.getLogger(HANDLER_LOG)

_OWN_PACKAGES = frozenset({"__main__", "marserve", "model_archiver", "ts"})
_INSTALLED = frozenset({"dist-packages", "site-packages"})
_FRAMES_BEFORE_MODULE = ("importlib", "marserve.backend")
_FRAMES_BEFORE_HANDLER = ("importlib", "marserve.")
_SETTINGS = ("*.json", "*.yaml", "*.yml")

Stamp = tuple[int, int]


def take_terminal() -> None:
    """Make the terminal of the session this process's standard input, output and error."""
    terminal = os.open("/dev/tty", os.O_RDWR)
    for descriptor in range(3):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    sys.dont_write_bytecode = True  # it identifies an edited file by size and second only
    # Not closed, like the one before.
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115


def debug(connection: FrontendConnection, load: Load, server: int) -> "DebuggedModel":
    """Load a model to debug it; ``server`` is the process id of the server."""
    model = DebuggedModel(load, lambda _number, _frame: os.kill(server, signal.SIGTERM))
    model.refresh()
    # The handler may get an end_sequence later.
    connection.send(Loaded(ends_sequences=load.stateful))
    print(_instructions(load), file=sys.stderr)  # noqa: T201 - to the author
    return model


class DebuggedModel:
    """A model that is loaded again when its files have changed.

    Ctrl-C calls ``on_interrupt`` while the handler does not run.
    """

    def __init__(self, load: Load, on_interrupt: Callable[[int, object], None]) -> None:
        self._on_interrupt = on_interrupt
        self._load = load
        self._service: Service | None = None
        self._refusal: Prediction | None = None
        self._files: dict[Path, Stamp | None] = {}
        self._folders = _folders(load)
        self._others = frozenset(sys.modules)
        self._handler_log = _HandlerLog()
        self._loop = new_loop() if load.asynchronous else None

    def refresh(self) -> None:
        """Load the model if it is not loaded, or its files have changed."""
        changed = [path for path, stamp in self._files.items() if _stamp(path) != stamp]
        if self._service is not None and not changed:
            return
        if changed:
            logger.info("Changed: %s. The model is loaded again.", ", ".join(map(str, changed)))
        self._unload()
        self._load_model()
        self._note_modules()

    def run_once(self, message: Profile | Compare) -> Profiled | Compared:
        """Refuse to run samples."""
        if isinstance(message, Compare):
            return Compared({})
        return Profiled(note="a handler that is debugged is not profiled")

    def predict(self, batch: Predict, send: Send) -> Reply:
        """Run the handler; a failure is an answer with the traceback.

        The frontend would split a failed batch, and reach the breakpoint again.
        """
        self.refresh()
        service = self._service
        if service is None:
            assert self._refusal is not None
            return Reply(predictions=[self._refusal] * batch.count)
        with self._interruptible():
            try:
                if self._loop is None:
                    reply = service.predict(batch, send)
                else:
                    reply = _finished(self._loop, service, batch, send)
            except (KeyboardInterrupt, SystemExit) as error:
                reply = failure_reply(error, service.context)
        self._note_modules()
        if reply.code == 200:
            return reply
        answer = self._handler_log.answer(reply.code, reply.message)
        return Reply(
            predictions=[answer] * batch.count,
            metrics=reply.metrics,
            poisoned=reply.poisoned,
        )

    def end_sequence(self, end: EndSequence) -> Reply:
        """Call the handler at the end of a sequence."""
        self.refresh()
        service = self._service
        if service is None:
            return Reply()
        with self._interruptible():
            try:
                if self._loop is None:
                    return service.end_sequence(end)
                return self._loop.run_until_complete(service.end_sequence_async(end))
            except (KeyboardInterrupt, SystemExit) as error:
                return failure_reply(error, service.context)

    def _load_model(self) -> None:
        run = self._loop.run_until_complete if self._loop else None
        with self._interruptible():
            try:
                self._service = load_service(self._load, run)
            except (Exception, KeyboardInterrupt, SystemExit) as error:
                _handler_logger.warning("The model cannot be loaded.", exc_info=error)
                what = f"The model cannot be loaded: {sentence_of(error)}"
                self._refusal = self._handler_log.answer(503, what)

    def _unload(self) -> None:
        self._service = self._refusal = None
        self._files.clear()
        for name in self._own_modules():
            del sys.modules[name]
        gc.collect()  # the next model needs the memory
        importlib.invalidate_caches()
        linecache.checkcache()
        for folder in self._folders:  # before they are read
            self._note(folder.glob("*.py"))
        for pattern in _SETTINGS:
            self._note(Path(self._load.model_dir).glob(pattern))

    def _note_modules(self) -> None:
        self._note(Path(str(sys.modules[name].__file__)) for name in self._own_modules())

    def _note(self, paths: Iterable[Path]) -> None:
        for path in map(Path.resolve, paths):
            if path not in self._files:
                self._files[path] = _stamp(path)

    def _own_modules(self) -> list[str]:
        return [
            name
            for name, module in list(sys.modules.items())  # another thread may import
            if name not in self._others
            and name.partition(".")[0] not in _OWN_PACKAGES
            and isinstance(file := getattr(module, "__dict__", {}).get("__file__"), str)
            and _is_own(file, self._folders)
        ]

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on Ctrl-C, and collect the log of the handler."""
        with self._handler_log.collected():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                yield
            finally:
                signal.signal(signal.SIGINT, self._on_interrupt)


class _HandlerLog(logging.Handler):
    """Collects what the service logs of a batch: tracebacks, and failures of results."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Add a record, or its traceback only."""
        error = record.exc_info and record.exc_info[1]
        text = _traceback_of(error) if error else record.getMessage()
        self._lines += text.splitlines()

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the records of a ``with`` block."""
        self._lines = []
        _handler_logger.addHandler(self)
        try:
            yield
        finally:
            _handler_logger.removeHandler(self)

    def answer(self, code: int, message: str) -> Prediction:
        """Return the answer to a request whose batch failed."""
        document = {
            "code": code,
            "type": "InternalServerException",
            "message": message,
            "traceback": self._lines,
        }
        body = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
        headers = {"content-type": "application/json"}
        return Prediction(body.encode("utf-8", "backslashreplace"), code, "", headers)


def _traceback_of(error: BaseException) -> str:
    """Return the traceback from the handler's frames on, or from the import of its module on."""
    frames = error.__traceback__
    begin = _behind(_FRAMES_BEFORE_HANDLER, frames) or _behind(_FRAMES_BEFORE_MODULE, frames)
    return "".join(traceback.format_exception(type(error), error, begin))


def _behind(modules: tuple[str, ...], frames: TracebackType | None) -> TracebackType | None:
    """Return the frames after the first ones that are of these modules."""
    while frames and frames.tb_frame.f_globals.get("__name__", "").startswith(modules):
        frames = frames.tb_next
    return frames


def _finished(
    loop: asyncio.AbstractEventLoop, service: Service, request: Predict, send: Send
) -> Reply:
    """Run a handler that is a coroutine; if interrupted, cancel it."""
    task = loop.create_task(service.predict_request(request, send))
    try:
        return loop.run_until_complete(task)
    except BaseException:
        if task.cancel():  # else it has ended
            with suppress(BaseException):
                loop.run_until_complete(task)
        raise


def _folders(load: Load) -> tuple[Path, ...]:
    """Return the directories of the model and of the handler."""
    model_dir = Path(load.model_dir).resolve()
    handler = Path(model_dir, load.handler.partition(":")[0]).resolve()
    return tuple(dict.fromkeys((model_dir, handler.parent)))


@functools.cache
def _is_own(file: str, folders: tuple[Path, ...]) -> bool:
    """Whether a module's file is a source in these directories, not of an installed package."""
    path = Path(file)
    if path.suffix != ".py" or not path.is_absolute():  # that of torch.ops is "_ops.py"
        return False
    path = path.resolve()
    return not _INSTALLED & set(path.parts) and any(map(path.is_relative_to, folders))


def _stamp(path: Path) -> Stamp | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _instructions(load: Load) -> str:
    where = " and ".join(map(str, _folders(load)))
    copy = "" if Path(load.model_dir).is_symlink() else " (the archive's are an unpacked copy)"
    return (
        f"Debugging {load.model_name}: breakpoint() opens the debugger here. Files in {where}{copy}"
        " are loaded again when they change. Ctrl-C interrupts a request, and stops the server "
        "between requests; torchserve --stop, in another terminal, stops it at any time."
    )
