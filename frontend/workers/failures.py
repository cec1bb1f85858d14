"""Failures of workers: the exceptions, their descriptions, and the back-off before a restart."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from marserve.frontend.logs.formats import one_line

# The longest reason of a failed load, which all clients get; a list of missing weights is long.
_MAX_CHARACTERS = 4000
# What TorchServe's log calls a timeout, on a line of its own.
_TIMEOUT = "org.pytorch.serve.wlm.WorkerInitializationException"
# Fibonacci's. TorchServe's begins with a 0 that is never used: it moved on before it looked.
_RETRY_SECONDS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
_CALM_SECONDS = 5.0
# How many workers in a row may die over requests without having answered any.
_MAX_UNANSWERED = 3


class ConnectionLost(Exception):
    """The worker cannot answer any more; says why. Its process has to be replaced.

    ``cause`` is what was found out about it since, a sentence; empty for nothing. ``code`` is the
    status for clients who wait for a load: 507 where the kernel ended it for want of memory.
    ``may_be_profiling``: perhaps not the model is to blame, but what was tried out with it.
    """

    cause = ""
    code = 500
    may_be_profiling = False

    def __str__(self) -> str:
        return with_cause(str(self.args[0]), self.cause)


class Disconnected(ConnectionLost):
    """The worker closed its connection, mostly because its process ended."""


class ResponseTimedOut(ConnectionLost):
    """The worker did not reply in time."""


class Poisoned(ConnectionLost):
    """The worker reported that it can serve no more, because of a sticky CUDA error, say."""


class StartTimedOut(ConnectionLost):
    """The process did not start in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__("Backend worker startup time out.")
        self.cause = f"Timeout: its process did not start within {seconds:g} s."


def may_be_profiling(error: Exception) -> bool:
    """Whether a worker was lost while batches may have been tried out."""
    return isinstance(error, ConnectionLost) and error.may_be_profiling


class LoadFailed(Exception):
    """The worker reported that its model cannot be loaded.

    With 500; 507 for out of memory, 400 for a model that is not what its settings say.
    ``permanent``: the next try would fail for the same reason.
    """

    def __init__(self, code: int, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.permanent = permanent


def with_cause(what: str, cause: str) -> str:
    """Two sentences; only the first where there is no cause."""
    return f"{what.removesuffix('.')}. {cause}" if cause else what


@dataclass(frozen=True)
class Diagnostics:
    """The last output of a worker, line by line.

    ``stack`` has the stacks of its threads when it crashed or on request, ``output`` the last lines
    that it printed.
    """

    stack: Sequence[str] = ()
    output: Sequence[str] = ()


@dataclass(frozen=True)
class Failure:
    """How a worker failed.

    Attributes:
        what: TorchServe's words for it, or what the worker reported.
        cause: Why, a sentence; empty where that is not known, or said already.
        moment: When, in seconds since the epoch.
    """

    what: str
    cause: str
    moment: float
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @classmethod
    def of(cls, error: Exception, diagnostics: Diagnostics) -> "Failure":
        """Make the failure of this moment from an exception."""
        if isinstance(error, ConnectionLost):
            return cls(error.args[0], error.cause, time.time(), diagnostics)
        return cls(_shortened(str(error)), "", time.time(), diagnostics)

    @property
    def reason(self) -> str:
        """What and why."""
        return with_cause(self.what, self.cause)


class FailureHistory:
    """The failures of one worker since its last success, and the log lines about them.

    ``last`` is None if it never failed or has succeeded since: by a load after a failed load, by an
    answer after any other failure.
    """

    def __init__(self, worker: str, log: "logging.LoggerAdapter[logging.Logger]") -> None:
        self.last: Failure | None = None
        self._worker = worker
        self._log = log
        self._has_loaded = False
        self._failed_loads = 0
        self._timeouts_in_a_row = 0
        self._is_recovering = False

    @property
    def has_loaded(self) -> bool:
        """Whether the model was loaded at the latest try."""
        return self._has_loaded and not self._failed_loads

    @property
    def cannot_load(self) -> bool:
        """Whether the model cannot be loaded, as far as the latest try tells.

        If it could be loaded before, one failure is not enough: the GPU memory of the dead worker,
        say, may not be free yet.
        """
        return self._failed_loads > (1 if self._has_loaded else 0)

    def loaded(self) -> None:
        """Note that a model was loaded."""
        if self._failed_loads:
            self.last = None
        self._failed_loads, self._has_loaded = 0, True
        if self._is_recovering:
            self._is_recovering = False
            self._log.info("Auto recovery succeeded, reset recoveryStartTS")

    def answered(self) -> None:
        """Note that a batch was answered."""
        self._timeouts_in_a_row = 0

    def failed(self, error: Exception, diagnostics: Diagnostics, *, was_ready: bool) -> None:
        """Note a failure, and log it in the lines that TorchServe's operators have alerts for."""
        if not was_ready and not may_be_profiling(error):
            self._failed_loads += 1
        failure = self.last = Failure.of(error, diagnostics)
        is_timeout = isinstance(error, ResponseTimedOut)
        if is_timeout:
            self._timeouts_in_a_row += 1
            self._log.error(
                "Number or consecutive unsuccessful inference %d", self._timeouts_in_a_row
            )
        text = report(
            failure,
            self._worker,
            is_timeout=is_timeout or isinstance(error, StartTimedOut),
            # Why a model cannot be loaded is told in full where it was tried.
            with_output=not isinstance(error, LoadFailed),
        )
        expected = isinstance(error, ConnectionLost | LoadFailed | OSError)
        self._log.error("%s", text, exc_info=None if expected else error)

    def recovering(self) -> None:
        """Note, and log, that the worker is about to recover."""
        if self._is_recovering or self.last is None:
            self._log.warning("Auto recovery failed again")
        else:
            self._is_recovering = True
            self._log.info("Auto recovery start timestamp: %d", self.last.moment * 1000)


def report(
    failure: Failure, worker: str, *, is_timeout: bool = False, with_output: bool = True
) -> str:
    """The text for the log, of several lines.

    There are alerts on TorchServe's words for a timeout. ``with_output``: the last lines of the
    worker's output belong to it.
    """
    if is_timeout:
        lines = [
            "Backend worker error",
            f"{_TIMEOUT}: {failure.what}",
            f"{worker}: {failure.cause}",
        ]
    else:
        first, *others = failure.reason.splitlines() or [""]
        lines = [f"Backend worker error: {worker}: {first}", *map(_indented, others)]
    if failure.diagnostics.stack:
        lines += ["Its Python stacks:", *map(_indented, failure.diagnostics.stack)]
    if failure.diagnostics.output and with_output:
        lines += ["The last of its output:", *map(_indented, failure.diagnostics.output)]
    return "\n".join(lines)


def _indented(line: str) -> str:
    return f"    {one_line(line)}"  # so that it cannot pass for a line of the log


def _shortened(text: str) -> str:
    """The beginning of what a worker reported; its own log has all of it."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    more = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}... ({more} characters more are in the model's log)"


class Backoff:
    """How long a failed worker waits before its next start: TorchServe's series and window.

    The window, in seconds, opens at the first failure after a success; a failure inside it earns
    another try, one after it does not.

    With one exception: a worker that was READY is replaced at once. What ended it (the kernel short
    of memory, an operator, one bad request) is gone mostly, and its model has shown that it can be
    loaded. Not so if it has failed only just before: a model that dies as soon as it is loaded
    would otherwise be started as fast as the machine can.

    A worker that dies while it has requests does not count as a failure of the model but of one of
    those, and is replaced at once however often that happens; unless several in a row answered
    nothing before they died, because then it may be the model after all.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._index = 0
        self._opened: float | None = None
        self._has_loaded = False
        self._failed_at = -math.inf
        self._unanswered = 0

    def failed(self, now: float, *, over_requests: bool = False) -> float | None:
        """Note a failure at ``now``; the seconds to wait before the next try, None for never.

        ``over_requests``: a READY worker had requests in flight.
        """
        was_well = self._has_loaded and now - self._failed_at >= _CALM_SECONDS
        self._has_loaded = False
        if over_requests and self._unanswered < _MAX_UNANSWERED:
            self._unanswered += 1
            was_well = True
        else:
            self._failed_at = now
        if self._opened is None:
            self._opened = now
        if self._window <= 0 or now - self._opened > self._window:
            return None
        if was_well:
            return 0.0
        self._index += 1
        return float(_RETRY_SECONDS[min(self._index, len(_RETRY_SECONDS)) - 1])

    def answered(self) -> None:
        """Note that the worker has answered a batch since its load."""
        self._unanswered = 0

    def succeeded(self) -> None:
        """Note a successful load: the series starts anew."""
        self._index = 0
        self._opened = None
        self._has_loaded = True

    def given_up(self, now: float) -> bool:
        """Whether the current streak of failures has outlived the window."""
        return self._opened is not None and now - self._opened > self._window
