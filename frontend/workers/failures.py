"""Failures of workers: the exceptions, their descriptions, and the back-off before a restart."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from marserve.frontend.logs.formats import one_line

# The length of a failed load's reason, which all clients get; a list of missing weights is long.
_MAX_CHARACTERS = 4000
# The line for a timeout in TorchServe's log.
_TIMEOUT = "org.pytorch.serve.wlm.WorkerInitializationException"
# Fibonacci's series. TorchServe's begins with a 0 that it never uses.
_RETRY_SECONDS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
_CALM_SECONDS = 5.0
# The number of workers in a row that may die over requests without an answer.
_MAX_UNANSWERED = 3


class ConnectionLost(Exception):
    """The worker cannot answer any more; its process must be replaced."""

    cause = ""  # a sentence, found out later
    code = 500  # for clients that wait for a load; 507 if the kernel killed it for lack of memory
    in_trial = False  # whether batches of samples, and not the model, may be the cause
    over_requests = False  # whether it had requests in flight

    def __str__(self) -> str:
        return with_cause(str(self.args[0]), self.cause)


class Disconnected(ConnectionLost):
    """The worker closed its connection, usually because its process ended."""


class ResponseTimedOut(ConnectionLost):
    """The worker did not reply in time."""


class Poisoned(ConnectionLost):
    """The worker reported that it cannot serve any longer, e.g. after a sticky CUDA error."""


class StartTimedOut(ConnectionLost):
    """The process did not start in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__("Backend worker startup time out.")
        self.cause = f"Timeout: its process did not start within {seconds:g} s."


class LoadFailed(Exception):
    """The worker reported that its model cannot be loaded."""

    def __init__(self, code: int, reason: str, *, permanent: bool = False) -> None:
        super().__init__(reason)
        self.code = code  # 500; 507 for out of memory, 400 for a model that contradicts settings
        self.permanent = permanent  # the next try would fail for the same reason


def with_cause(what: str, cause: str) -> str:
    """Return two sentences; only the first if there is no cause."""
    return f"{what.removesuffix('.')}. {cause}" if cause else what


@dataclass(frozen=True)
class Diagnostics:
    """The last output of a worker, as lines."""

    stack: Sequence[str] = ()  # the stacks of its threads at a crash or on request
    output: Sequence[str] = ()


@dataclass(frozen=True)
class Failure:
    """How a worker failed."""

    what: str  # TorchServe's text for it, or the worker's report
    cause: str  # a sentence; empty if the cause is unknown, or part of ``what``
    moment: float  # seconds since the epoch
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @classmethod
    def of(cls, error: Exception, diagnostics: Diagnostics) -> "Failure":
        """Return the failure of this moment for an exception."""
        if isinstance(error, ConnectionLost):
            return cls(error.args[0], error.cause, time.time(), diagnostics)
        return cls(_shortened(str(error)), "", time.time(), diagnostics)

    @property
    def reason(self) -> str:
        """The failure and its cause."""
        return with_cause(self.what, self.cause)


class FailureHistory:
    """The failures of one worker, and the log lines about them.

    Attributes:
        last: None if it never failed.
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
        """Whether the latest load succeeded."""
        return self._has_loaded and not self._failed_loads

    @property
    def cannot_load(self) -> bool:
        """Whether the latest load failed; twice in a row, if the model was loaded before.

        Then one failure may have another cause: GPU memory of the dead worker is not free yet.
        """
        return self._failed_loads > (1 if self._has_loaded else 0)

    def loaded(self) -> None:
        """Note that the model was loaded."""
        self._failed_loads, self._has_loaded = 0, True
        if self._is_recovering:
            self._is_recovering = False
            self._log.info("Auto recovery succeeded, reset recoveryStartTS")

    def answered(self) -> None:
        """Note an answer."""
        self._timeouts_in_a_row = 0

    def failed(self, error: Exception, diagnostics: Diagnostics, *, was_ready: bool) -> None:
        """Note a failure, and log it in the form for which TorchServe's operators have alerts."""
        is_trial = isinstance(error, ConnectionLost) and error.in_trial
        if not was_ready and not is_trial:
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
            # The worker has logged a failed load completely.
            with_output=not isinstance(error, LoadFailed),
        )
        expected = isinstance(error, ConnectionLost | LoadFailed | OSError)
        self._log.error("%s", text, exc_info=None if expected else error)

    def recovering(self) -> None:
        """Log that the worker is started again."""
        if self._is_recovering or self.last is None:
            self._log.warning("Auto recovery failed again")
        else:
            self._is_recovering = True
            self._log.info("Auto recovery start timestamp: %d", self.last.moment * 1000)


def report(
    failure: Failure, worker: str, *, is_timeout: bool = False, with_output: bool = True
) -> str:
    """Return the text for the log; for a timeout with TorchServe's lines, which alerts match."""
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
    return f"    {one_line(line)}"  # it must not look like a line of the log


def _shortened(text: str) -> str:
    if len(text) <= _MAX_CHARACTERS:
        return text
    more = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}... ({more} characters more are in the model's log)"


class Backoff:
    """The delay before a failed worker is started again: TorchServe's series and window.

    The window, in seconds, opens at the first failure after a success. A failure inside it is
    followed by another try, a later one is not.

    A worker that was READY is replaced at once, because the cause is usually gone, except shortly
    after another failure. One that dies while it has requests counts as a failure of one of these,
    and is replaced at once each time, unless several in a row died without an answer.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._index = 0
        self._opened: float | None = None
        self._has_loaded = False
        self._failed_at = -math.inf
        self._unanswered = 0

    def failed(self, now: float, *, over_requests: bool = False) -> float | None:
        """Note a failure; return the seconds until the next try, None for no other try.

        ``over_requests`` says whether a READY worker had requests in flight.
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
        """Note a successful load: the series starts again."""
        self._index = 0
        self._opened = None
        self._has_loaded = True

    def given_up(self, now: float) -> bool:
        """Return whether the window is over without a success."""
        return self._opened is not None and now - self._opened > self._window
