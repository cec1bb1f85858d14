"""What one execution of a target may cost, and how that is measured.

Work is counted in calls of Python functions, which neither the machine nor its load changes. What a
single call of the C library costs that count does not show, so there is a limit of CPU time too,
wide enough for a busy machine, and judged by the best of three executions. Memory is the peak that
Python has allocated, touched or not.
"""

import cProfile
import signal
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

Target = Callable[[bytes], None]


class LimitExceeded(AssertionError):
    """An input costs more than inputs of its length may."""


class _Hangs(BaseException):
    """Not an Exception: parsers that catch whatever a file makes of them must not catch this."""


@dataclass(frozen=True)
class Limits:
    """What an input may cost: so much, and so much for each of its bytes."""

    calls: int = 5_000
    calls_per_byte: float = 50.0
    seconds: float = 0.2
    seconds_per_byte: float = 20e-6
    memory: int = 4 << 20
    memory_per_byte: int = 2_000


@dataclass(frozen=True)
class Cost:
    """What an execution has cost."""

    calls: int
    seconds: float
    memory: int


# An execution that is still under way after so many times its limit is ended.
_HANGS_AFTER = 5.0
_PROFILER_SLOWDOWN = 5.0


def slowdown() -> float:
    """How many times slower than plain Python this process executes it just now."""
    factor = 1.0 if sys.getprofile() is None else _PROFILER_SLOWDOWN
    if tracemalloc.is_tracing():
        factor *= 3.0
    if "atheris" in sys.modules:
        factor *= 3.0
    return factor


def measure(target: Target, data: bytes, limits: Limits, *, with_memory: bool = True) -> Cost:
    """Execute a target, and return what that has cost.

    Args:
        target: Raises AssertionError where it finds something wrong.
        data: The input.
        limits: How much it may cost.
        with_memory: Whether memory is measured too, which takes three times as long.

    Raises:
        LimitExceeded: It costs more than it may.
    """
    allowed = (limits.seconds + limits.seconds_per_byte * len(data)) * slowdown()
    seconds = _timed(target, data, allowed)
    for _ in range(2):
        if seconds > allowed:
            seconds = min(seconds, _timed(target, data, allowed))
    _check("seconds of CPU time", seconds, allowed, data)
    calls, memory = _counted(target, data, allowed, with_memory=with_memory)
    _check("calls of functions", calls, limits.calls + limits.calls_per_byte * len(data), data)
    _check("bytes of memory", memory, limits.memory + limits.memory_per_byte * len(data), data)
    return Cost(calls, seconds, memory)


def _check(what: str, cost: float, allowed: float, data: bytes) -> None:
    if cost > allowed:
        raise LimitExceeded(f"{cost:.6g} {what} for {len(data)} bytes; {allowed:.6g} are allowed")


def _timed(target: Target, data: bytes, allowed: float) -> float:
    began = time.process_time()
    with _ended_after(allowed * _HANGS_AFTER):
        target(data)
    return time.process_time() - began


def _counted(target: Target, data: bytes, allowed: float, *, with_memory: bool) -> tuple[int, int]:
    """How many functions are called, and the peak of memory."""
    profiler = cProfile.Profile(subcalls=False, builtins=False)
    if with_memory:
        tracemalloc.start()
    try:
        with _ended_after(allowed * _PROFILER_SLOWDOWN * _HANGS_AFTER):
            profiler.runcall(target, data)
        memory = tracemalloc.get_traced_memory()[1] if with_memory else 0
    finally:
        if with_memory:
            tracemalloc.stop()
    return sum(entry.callcount for entry in profiler.getstats()), memory


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End what hangs, by CPU time of this process."""

    def end(_signal: int, _frame: FrameType | None) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGVTALRM, end)
    # Again and again: a first one may be lost, in a destructor or a callback of the C library.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.1)
    try:
        yield
    except _Hangs:
        raise LimitExceeded(f"it is not done after {seconds:.3g} s of CPU time") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
