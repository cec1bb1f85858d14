"""The time lines of requests: when each was received, queued, sent to a worker and answered.

A time line is made when its request is answered, of moments that are known by then. One ring has
those of the last requests. Each model version keeps the slowest of each half minute, and the last
that failed, so that many quick requests do not displace them.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappush, heappushpop, nlargest
from itertools import chain, count, islice
from typing import NamedTuple

from marserve.frontend.aio.long_work import Steps
from marserve.frontend.batching.batches import Batch
from marserve.frontend.telemetry.trace_context import RequestTrace

#: The most nested time lines that one keeps, in all depths.
MAX_NESTED = 100
_RECENT = 10_000
_LATEST = 1000  # requests of a batch, which are answered together
_SLOT_SECONDS = 30.0
_SLOTS = 10
_SLOWEST = 20  # of a slot
_FAILED = 100
_REFUSED = 20

#: Outcomes of requests.
ANSWERED, FAILED, REFUSED = "answered", "failed", "refused"
EXPIRED, CANCELLED = "expired", "cancelled"


class TimeLine(NamedTuple):
    """One request; moments are seconds on the monotonic clock.

    Attributes:
        arrived: When its head was received.
        queued: When it was received and queued, or refused.
        batch: The batch in which it was sent to a worker last; None if it was not sent.
        answered: When its answer, or the last piece of it, was ready.
        status: The status of the answer; 499 if the client left before.
        size: The bytes of its input.
        attempts: How often it was sent to a worker.
        nested: The nodes of a workflow, or the calls of other models, that it waited for.
        first_piece: When the first piece of a streamed answer was ready; else 0.
    """

    id: str
    model: "ModelLines"
    arrived: float
    queued: float
    batch: Batch | None
    answered: float
    outcome: str = ANSWERED
    status: int = 200
    error: str = ""
    size: int = 0
    attempts: int = 1
    nested: "Sequence[TimeLine]" = ()
    trace: RequestTrace | None = None
    first_piece: float = 0.0

    @property
    def trace_id(self) -> str:
        """The id of its trace; empty without one."""
        return "" if self.trace is None else self.trace.trace_id

    @property
    def took(self) -> float:
        """Seconds from its arrival to its answer."""
        return self.answered - self.arrived


IsWanted = Callable[[TimeLine], bool]


class NestedLines(list[TimeLine]):
    """The time lines of the requests that a request waits for, at most `MAX_NESTED`."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        super().__init__()
        self.total = 0  # in all depths

    def nest(self, line: TimeLine) -> None:
        """Add a line, unless there are too many; without its own nested lines if they are."""
        inner = line.nested.total if isinstance(line.nested, NestedLines) else 0
        if self.total + 1 + inner > MAX_NESTED:
            line, inner = line._replace(nested=()), 0
        if self.total < MAX_NESTED:
            self.total += 1 + inner
            self.append(line)


class TimeLines:
    """The time lines of a server: the last of all requests, and those that the models keep."""

    def __init__(self) -> None:
        self.recent: deque[TimeLine] = deque(maxlen=_RECENT)
        #: Called with each time line of a recorded request.
        self.on_recorded: Callable[[TimeLine], object] = lambda _line: None
        self._models: dict[ModelLines, None] = {}

    def of_model(self, name: str, version: str) -> "ModelLines":
        """Return the time lines of a new model version, which `ModelLines.close` removes."""
        lines = ModelLines(name, version, self)
        self._models[lines] = None
        return lines

    def remove(self, lines: "ModelLines") -> None:
        """Forget a model version; its recent time lines stay. Safe to call twice."""
        self._models.pop(lines, None)

    def find(self, request_id: str) -> TimeLine | None:
        """Return the time line of a request, if it is still known; the newest are found first."""
        kept = chain.from_iterable(lines.kept() for lines in self._models)
        known = chain(reversed(self.recent), kept)
        return next((line for line in known if line.id == request_id), None)

    def of_answer(self, request_id: str) -> TimeLine | None:
        """Return the time line of a request that is being answered; None if it has none."""
        latest = islice(reversed(self.recent), _LATEST)
        return next((line for line in latest if line.id == request_id), None)

    def slowest(self, most: int, is_wanted: IsWanted) -> Steps[list[TimeLine]]:
        """Return the slowest time lines, the slowest first."""
        return self._first(most, is_wanted, ModelLines.slow, lambda line: line.took)

    def failed(self, most: int, is_wanted: IsWanted) -> Steps[list[TimeLine]]:
        """Return the last that failed, expired or were refused, the newest first."""
        return self._first(most, is_wanted, ModelLines.failures, lambda line: line.answered)

    def _first(
        self,
        most: int,
        is_wanted: IsWanted,
        lines_of: Callable[["ModelLines"], Iterator[TimeLine]],
        key: Callable[[TimeLine], float],
    ) -> Steps[list[TimeLine]]:
        found: list[TimeLine] = []
        for lines in list(self._models):
            found = nlargest(most, chain(found, filter(is_wanted, lines_of(lines))), key)
            yield 0
        return found


class ModelLines:
    """The time lines of a model version, or of a workflow, whose version is empty."""

    def __init__(self, name: str, version: str, server: TimeLines) -> None:
        self.name = name
        self.version = version
        self._server = server
        self._recent = server.recent
        #: Heaps of the slowest requests, by their seconds; the last one is of this half minute.
        self._slots: deque[list[tuple[float, int, TimeLine]]] = deque(maxlen=_SLOTS)
        self._numbers = count()  # so that no two items are equal
        self._slot_ends = 0.0
        #: A request that takes longer is one of the slowest.
        self._slow_seconds = -1.0
        self._failed: deque[TimeLine] = deque(maxlen=_FAILED)
        #: Apart, because a full queue refuses thousands in a second.
        self._refused: deque[TimeLine] = deque(maxlen=_REFUSED)

    def add(self, line: TimeLine) -> None:
        """Add the time line of a request that was queued."""
        if line.outcome is REFUSED:
            self._refused.append(line)
        elif line.outcome is EXPIRED:
            self._keep_failed(line)
        self.answered(line, line.took)

    def answered(self, line: TimeLine, took: float) -> None:
        """Add the time line of a request that was answered by the handler in ``took`` seconds."""
        self._recent.append(line)
        if took > self._slow_seconds or line.answered >= self._slot_ends:
            self._add_slow(line)
        if line.outcome is FAILED:
            self._keep_failed(line)
        if line.trace is not None and line.trace.is_recorded:
            self._server.on_recorded(line)

    def refused(
        self,
        id_: str,
        arrived: float,
        now: float,
        status: int,
        error: str,
        trace: RequestTrace | None = None,
    ) -> None:
        """Add a request that was not queued."""
        line = TimeLine(id_, self, arrived, now, None, now, REFUSED, status, error, trace=trace)
        self._refused.append(line)
        if trace is not None and trace.is_recorded:
            self._server.on_recorded(line)

    def close(self) -> None:
        """Remove them from the server."""
        self._server.remove(self)

    def slow(self) -> Iterator[TimeLine]:
        """Iterate over the slowest of each of the last half minutes that had requests."""
        return (line for slot in self._slots for _, _, line in slot)

    def failures(self) -> Iterator[TimeLine]:
        """Iterate over the last that failed, and the last that were refused."""
        yield from self._failed
        yield from self._refused

    def kept(self) -> Iterator[TimeLine]:
        """Iterate over all that stay when the ring has lost them."""
        yield from self.slow()
        yield from self.failures()

    def last_failure(self) -> TimeLine | None:
        """Return the newest request that failed, with its error."""
        return self._failed[-1] if self._failed else None

    def recent(self, most: int) -> list[TimeLine]:
        """Return up to ``most`` of the newest time lines of this model, in no order."""
        found: list[TimeLine] = []
        for line in reversed(self._recent):
            if line.model is self:
                found.append(line)
                if len(found) == most:
                    break
        return found

    def _add_slow(self, line: TimeLine) -> None:
        if line.answered >= self._slot_ends:
            self._slots.append([])
            self._slot_ends = line.answered + _SLOT_SECONDS
            self._slow_seconds = -1.0
        slot, item = self._slots[-1], (line.took, next(self._numbers), line)
        if len(slot) < _SLOWEST:
            heappush(slot, item)
        else:
            heappushpop(slot, item)
        if len(slot) == _SLOWEST:
            self._slow_seconds = slot[0][0]
        if line.batch is not None:
            line.batch.read_sizes()

    def _keep_failed(self, line: TimeLine) -> None:
        self._failed.append(line)
        if line.batch is not None:
            line.batch.read_sizes()
