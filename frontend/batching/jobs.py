"""One request's unit of work, and the bounded line it stands in.

A job is answered exactly once: `Job.resolve` and `Job.fail` do nothing after the first of them, nor
after `Job.cancel`. An answer in pieces counts as one: with its first piece comes a `Stream`.

There is one line, in the order in which jobs are due to leave (`Job.order`). The policy says what
that is: the moment of arrival, or the deadline. A lower priority puts it later by a constant, so
that every class is served in turn and none starves: a job that has waited that much longer goes
first. Seats are bounded per class: a flood of one leaves the seats of the others free.
"""

import contextlib
import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from operator import attrgetter

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import ServeError

#: What becomes of a request.
Answer = Prediction | Stream | ServeError
OnAnswer = Callable[[Answer], None]

_order_of = attrgetter("order")


class Group(Enum):
    """Who may travel together: handlers look at the first request to see what a batch wants."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    #: A question about the model; each travels alone, and waits for no company.
    DESCRIBE = "describe"


class Priority(IntEnum):
    """How urgent a request is; a smaller number goes first."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Job:
    """One request on its way through the server.

    Args:
        input: What the client sent.
        arrived: Moment at which it was queued, seconds on the monotonic clock.
        on_answer: Called with the answer, once; must not raise.
        group: Jobs share a batch with others of their group only.
        deadline: Moment after which the answer is of no use, on the same clock.
        priority: Its class.

    Attributes:
        on_answer: None once it has been called, or nobody waits.
        order: Its place in the line, smallest first; by default its arrival.
        dispatched: Moment it left for a worker; None while it is queued.
        stream: Where its pieces go; None until there is one.
        crashes: Workers that died while they held it.
    """

    __slots__ = (
        "arrived",
        "crashes",
        "deadline",
        "dispatched",
        "group",
        "input",
        "on_answer",
        "order",
        "priority",
        "stream",
    )

    def __init__(
        self,
        input_: Input,
        arrived: float,
        on_answer: OnAnswer,
        group: Group = Group.PREDICT,
        *,
        deadline: float = math.inf,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        self.input = input_
        self.arrived = arrived
        self.on_answer: OnAnswer | None = on_answer
        self.group = group
        self.deadline = deadline
        self.priority = priority
        self.order = arrived
        self.dispatched: float | None = None
        self.stream: Stream | None = None
        self.crashes = 0

    @property
    def is_open(self) -> bool:
        """Whether somebody still waits for an answer, or for more of it."""
        if self.stream is not None:
            return self.stream.is_open
        return self.on_answer is not None

    def resolve(self, prediction: Prediction) -> None:
        """Answer with a prediction, or with the last piece of one."""
        if self.stream is not None:
            self.stream.push(prediction.body)
            self.stream.end()
        else:
            self.answer(prediction)

    def push(self, piece: Prediction) -> None:
        """Answer with a piece of a prediction; others follow."""
        if self.stream is not None:
            self.stream.push(piece.body)
        elif self.on_answer is not None:
            self.stream = Stream(piece)
            self.answer(self.stream)

    def fail(self, error: ServeError) -> None:
        """Answer with a failure; an answer that has begun is broken off."""
        if self.stream is not None:
            self.stream.break_off(error.message)
        else:
            self.answer(error)

    def cancel(self) -> None:
        """Nobody waits for the answer any more, nor for what is left of it."""
        self.on_answer = None
        if self.stream is not None:
            self.stream.close()

    def answer(self, answer: Answer) -> None:
        """Call back with an answer; nothing after the first, nor where nobody waits."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer(answer)


class JobQueue:
    """The line of one model version, bounded.

    Args:
        capacity: Jobs of a class that may wait, where ``seats`` says nothing of it. Those in a
            worker do not count.
        seats: For single classes, how many of them may wait.
    """

    def __init__(self, capacity: int, seats: Mapping[Priority, int] | None = None) -> None:
        self._line: deque[Job] = deque()
        #: Jobs whose worker died: they go first, each by itself, for one of them may be to blame.
        self._suspects: deque[Job] = deque()
        self._taken = [0] * len(Priority)
        #: Whether, since the line was last empty, somebody was overtaken or had a deadline.
        self._was_overtaken = self._had_deadlines = False
        self.resize(capacity, seats)

    def resize(self, capacity: int, seats: Mapping[Priority, int] | None = None) -> None:
        """Change the bounds; nobody who has a seat loses it."""
        self.capacity = capacity
        self._seats = [(seats or {}).get(priority, capacity) for priority in Priority]

    def __len__(self) -> int:
        return len(self._line) + len(self._suspects)

    def has_seat(self, priority: Priority, count: int = 1) -> bool:
        """Whether so many more jobs of a class may join."""
        return self._taken[priority] + count <= self._seats[priority]

    def free_seats(self, priority: Priority) -> int:
        """How many more jobs of a class may join."""
        return max(0, self._seats[priority] - self._taken[priority])

    @property
    def oldest_arrival(self) -> float:
        """When the one arrived that waits longest; only for a queue that is not empty."""
        if not self._suspects and not self._was_overtaken:
            return self._line[0].arrived
        return min(job.arrived for job in (*self._suspects, *self._line))

    def starts_with(self, job: Job) -> bool:
        """Whether a job is the first in line; only for a queue that is not empty."""
        return self._first is job

    @property
    def first_group(self) -> Group:
        """The group of the first in line; only for a queue that is not empty."""
        return self._first.group

    @property
    def first_travels_alone(self) -> bool:
        """Whether the first in line must not have company; only for a queue that is not empty."""
        return bool(self._suspects) or self._line[0].group is Group.DESCRIBE

    @property
    def _first(self) -> Job:
        return self._suspects[0] if self._suspects else self._line[0]

    @property
    def earliest_deadline(self) -> float:
        """The earliest of all in line, infinite for none."""
        if not self._had_deadlines:
            return math.inf
        return min((job.deadline for job in self._line), default=math.inf)

    def deadline_at(self, index: int) -> float:
        """The deadline of the job at this place in the line, from 0."""
        return self._line[index].deadline

    def ahead_of(self, order: float) -> int:
        """How many jobs would leave before one of this `Job.order` that joined now."""
        line = self._line
        if not line or line[-1].order <= order:
            return len(self)
        return len(self._suspects) + bisect_right(line, order, key=_order_of)

    def append(self, job: Job) -> None:
        """Add a job at its place, behind those of the same order. The caller asked `has_seat`."""
        line = self._line
        self._taken[job.priority] += 1
        if not line:
            self._was_overtaken = self._had_deadlines = False
        if job.deadline < math.inf:
            self._had_deadlines = True
        if not line or line[-1].order <= job.order:
            line.append(job)
        else:
            self._was_overtaken = True
            line.insert(bisect_right(line, job.order, key=_order_of), job)

    def reorder(self, order: Callable[[Job], float]) -> None:
        """Put the line into another order; suspects stay in front."""
        for job in self._line:
            job.order = order(job)
        self._line = deque(sorted(self._line, key=_order_of))
        self._was_overtaken = True

    def bring_back(self, job: Job) -> None:
        """Take a job in again whose worker died; it goes first, and alone, whatever the bounds."""
        job.dispatched = None
        self._taken[job.priority] += 1
        self._suspects.append(job)

    def discard(self, job: Job) -> None:
        """Take a job out of the line, wherever it stands; nothing if it has left already."""
        if job.dispatched is not None:
            return
        if job.crashes:
            with contextlib.suppress(ValueError):
                self._suspects.remove(job)
                self._taken[job.priority] -= 1
        elif (place := self._place_of(job)) is not None:
            del self._line[place]
            self._taken[job.priority] -= 1

    def pop(self, count: int) -> list[Job]:
        """Take up to ``count`` jobs of one group from the front; nobody waits for those left out.

        A job of another group ends what is taken before it; one that must travel alone does.
        """
        popped: list[Job] = []
        if self._suspects:
            self._take(self._suspects, popped)
            return popped
        line, taken, group = self._line, self._taken, None
        while line and len(popped) < count:
            job = line[0]
            if popped and (job.group is not group or group is Group.DESCRIBE):
                break
            line.popleft()
            taken[job.priority] -= 1
            if job.is_open:
                popped.append(job)
                group = job.group
        return popped

    def drop(self, count: int) -> list[Job]:
        """Take the first ``count`` jobs out of the line, behind suspects, whatever their groups.

        Returns:
            Those for whose answer somebody waits.
        """
        dropped: list[Job] = []
        for _ in range(count):
            self._take(self._line, dropped)
        return dropped

    def _place_of(self, job: Job) -> int | None:
        line = self._line
        first = bisect_left(line, job.order, key=_order_of)
        for place in range(first, len(line)):
            if line[place] is job:
                return place
            if line[place].order != job.order:
                break
        return None

    def _take(self, line: deque[Job], popped: list[Job]) -> None:
        job = line.popleft()
        self._taken[job.priority] -= 1
        if job.is_open:
            popped.append(job)

    def clear(self) -> list[Job]:
        """Take all jobs out of the line."""
        jobs = [*self._suspects, *self._line]
        self._suspects.clear()
        self._line.clear()
        self._taken = [0] * len(Priority)
        return jobs
