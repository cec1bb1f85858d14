"""Who sends requests: many who do not care for each other, or few who wait for their answers."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from virtual_time import VirtualLoop

from marserve.frontend.batching.jobs import Answer
from marserve.frontend.errors import ServeError

# A client that was refused comes again after this long at least.
LEAST_RETRY_SECONDS = 0.001


class Request:
    """One request; notes when it is answered."""

    __slots__ = ("answered", "arrived", "client", "deadline", "error")

    def __init__(self, arrived: float, client: "Clients") -> None:
        self.arrived = arrived
        self.deadline = arrived + client.goal
        self.client = client
        self.answered = math.nan
        self.error: object = None

    def on_answer(self, answer: Answer) -> None:
        """It is answered now; or refused, though it was in the queue."""
        if isinstance(answer, ServeError):
            self.error = answer
        else:
            self.answered = self.client.loop.now
        self.client.answered(0.0)


@dataclass
class Clients:
    """Who sends requests; those of an open loop do not care for answers.

    Args:
        loop: Tells the time.
        goal: Seconds within which an answer is of use.
    """

    loop: VirtualLoop
    goal: float
    requests: list[Request] = field(default_factory=list, init=False)
    send: Callable[[Request], float | None] = field(init=False)

    def start(self) -> None:
        """Begin to send."""

    def prepare(self, request: Request) -> None:
        """Change a request before it is sent."""

    def answered(self, retry: float) -> None:
        """One of the requests has its answer; seconds after which its client may come again."""

    def _send(self) -> None:
        request = Request(self.loop.now, self)
        self.requests.append(request)
        self.prepare(request)
        retry = self.send(request)
        if retry is not None:
            request.error = "refused"
            self.answered(retry)


@dataclass
class OpenLoop(Clients):
    """Requests come when they come.

    Args:
        arrivals: The moments, ascending, seconds.
    """

    arrivals: NDArray[np.float64]

    def start(self) -> None:
        """See `Clients`."""
        self._moments = iter(self.arrivals.tolist())
        self._await_next()

    def _await_next(self) -> None:
        moment = next(self._moments, None)
        if moment is not None:
            self.loop.call_at(moment, self._arrive)

    def _arrive(self) -> None:
        self._await_next()
        self._send()


@dataclass
class ClosedLoop(Clients):
    """Each client sends its next request when the last one is answered.

    Args:
        clients: How many.
        total: Requests in all.
        away: Mean seconds from an answer to the next request; they vary at random by a tenth.
    """

    clients: int
    total: int
    away: float = 0.0

    def start(self) -> None:
        """See `Clients`."""
        self._left = self.total
        self._random = random.Random(0)
        for _ in range(self.clients):
            self.loop.call_later(0.0, self._come)

    def answered(self, retry: float) -> None:
        """See `Clients`."""
        pause = max(retry, LEAST_RETRY_SECONDS) if retry else 0.0
        way = self.away * self._random.uniform(0.9, 1.1) if self.away else 0.0
        self.loop.call_later(pause + way, self._come)

    def _come(self) -> None:
        if self._left:
            self._left -= 1
            self._send()
