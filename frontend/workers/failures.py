"""How a worker failed, as it is told to the client, in the log and in describe."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from marserve.frontend.logs.setup import one_line

# Every client of a model that cannot be loaded is told why; a list of missing weights is long.
_MOST_CHARACTERS = 4000
# What TorchServe's log calls a timeout, on a line of its own.
_TIMEOUT = "org.pytorch.serve.wlm.WorkerInitializationException"


@dataclass(frozen=True)
class Remains:
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
        what: TorchServe's words for it, or what the worker told.
        cause: Why, a sentence; empty where that is not known, or said already.
        moment: When, in seconds since the epoch.
        remains: What there is to look at.
    """

    what: str
    cause: str
    moment: float
    remains: Remains = field(default_factory=Remains)

    @property
    def reason(self) -> str:
        """What and why."""
        return with_cause(self.what, self.cause)


def with_cause(what: str, cause: str) -> str:
    """Two sentences; only the first where there is no cause."""
    return f"{what.removesuffix('.')}. {cause}" if cause else what


def brief(text: str) -> str:
    """The beginning of what a worker told; its own log has all of it."""
    if len(text) <= _MOST_CHARACTERS:
        return text
    more = len(text) - _MOST_CHARACTERS
    return f"{text[:_MOST_CHARACTERS]}... ({more} characters more are in the model's log)"


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
    if failure.remains.stack:
        yield "Its Python stacks:"
        yield from map(_indented, failure.remains.stack)
    if failure.remains.output and with_output:
        yield "The last of its output:"
        yield from map(_indented, failure.remains.output)


def _indented(line: str) -> str:
    return f"    {one_line(line)}"  # so that it cannot pass for a line of the log
