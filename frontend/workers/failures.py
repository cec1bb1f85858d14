"""How a worker failed, as it is told to the client, in the log and in describe; and how often."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from marserve.frontend.logs.formats import one_line
from marserve.frontend.workers.errors import (
    ConnectionLost,
    LoadFailed,
    LostInProfiling,
    ResponseTimedOut,
    StartTimedOut,
    with_cause,
)

# Every client of a model that cannot be loaded is told why; a list of missing weights is long.
_MAX_CHARACTERS = 4000
# What TorchServe's log calls a timeout, on a line of its own.
_TIMEOUT = "org.pytorch.serve.wlm.WorkerInitializationException"


@dataclass(frozen=True)
class Diagnostics:
    """What a worker left behind, line by line.

    Attributes:
        stack: The Python stacks of its threads when it crashed, or was asked for them.
        output: The last it printed.
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
        diagnostics: What there is to look at.
    """

    what: str
    cause: str
    moment: float
    diagnostics: Diagnostics = field(default_factory=Diagnostics)

    @classmethod
    def of(cls, error: Exception, diagnostics: Diagnostics) -> "Failure":
        """The failure that an exception stands for, at this moment."""
        if isinstance(error, ConnectionLost):
            return cls(error.args[0], error.cause, time.time(), diagnostics)
        return cls(_shortened(str(error)), "", time.time(), diagnostics)

    @property
    def reason(self) -> str:
        """What and why."""
        return with_cause(self.what, self.cause)


class FailureHistory:
    """The failures of one worker since it did well, and the log's lines about them.

    Attributes:
        last: How it failed last; None if it never did, or has done well since: by a load after a
            load that failed, by an answer after any other failure.
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
    def cannot_load(self) -> bool:
        """Whether the model cannot be loaded, as far as the latest try tells.

        Where it could be loaded before, one failure says little: what the dead worker held of a
        GPU's memory, say, may not have been given back yet.
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
        if not was_ready and not isinstance(error, LostInProfiling):
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

    Args:
        failure: What happened.
        worker: Name of the worker.
        is_timeout: Whether it was a timeout, for which there are alerts on TorchServe's words.
        with_output: Whether the last lines of its output belong to it.
    """
    return "\n".join(_report(failure, worker, is_timeout, with_output))


def _report(failure: Failure, worker: str, is_timeout: bool, with_output: bool) -> Iterator[str]:
    if is_timeout:
        yield "Backend worker error"
        yield f"{_TIMEOUT}: {failure.what}"
        yield f"{worker}: {failure.cause}"
    else:
        first, *others = failure.reason.splitlines() or [""]
        yield f"Backend worker error: {worker}: {first}"
        yield from map(_indented, others)
    if failure.diagnostics.stack:
        yield "Its Python stacks:"
        yield from map(_indented, failure.diagnostics.stack)
    if failure.diagnostics.output and with_output:
        yield "The last of its output:"
        yield from map(_indented, failure.diagnostics.output)


def _indented(line: str) -> str:
    return f"    {one_line(line)}"  # so that it cannot pass for a line of the log


def _shortened(text: str) -> str:
    """The beginning of what a worker reported; its own log has all of it."""
    if len(text) <= _MAX_CHARACTERS:
        return text
    more = len(text) - _MAX_CHARACTERS
    return f"{text[:_MAX_CHARACTERS]}... ({more} characters more are in the model's log)"
