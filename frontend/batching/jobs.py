"""One request's unit of work.

A job is answered exactly once: `Job.resolve` and `Job.fail` do nothing after the first of them, nor
after `Job.cancel`. An answer in pieces counts as one: with its first piece comes a `Stream`.
"""

import math
from collections.abc import Callable
from enum import Enum, IntEnum

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.streams import Stream
from marserve.frontend.errors import ServeError

#: What becomes of a request.
Answer = Prediction | Stream | ServeError
OnAnswer = Callable[[Answer], None]


class Group(Enum):
    """Who may share a batch: handlers look at the first request to see what a batch wants."""

    PREDICT = "predict"
    EXPLAIN = "explain"
    #: A question about the model; each runs alone, and waits for no company.
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
        priority: Its priority.

    Attributes:
        on_answer: None once it has been called, or nobody waits.
        order: Its place in the queue, smallest first; by default its arrival.
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
