"""Time that passes only from event to event."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Timer:
    """What `VirtualLoop.call_later` gives, like `asyncio.TimerHandle`."""

    __slots__ = ("arguments", "callback")

    def __init__(self, callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        self.callback: Callable[..., object] | None = callback
        self.arguments = arguments

    def cancel(self) -> None:
        """Never ring."""
        self.callback = None


class VirtualLoop:
    """The part of an event loop that a batcher uses."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Timer]] = []
        self._number = count()

    def time(self) -> float:
        """The moment, seconds."""
        return self.now

    def call_later(
        self, delay: float, callback: Callable[..., object], *arguments: object
    ) -> Timer:
        """Ring in so many seconds."""
        return self.call_at(self.now + delay, callback, *arguments)

    def call_at(self, when: float, callback: Callable[..., object], *arguments: object) -> Timer:
        """Ring at a moment; those of the same moment in the order in which they were asked for."""
        timer = Timer(callback, arguments)
        heapq.heappush(self._timers, (when, next(self._number), timer))
        return timer

    def run(self) -> None:
        """Until nothing is left to happen."""
        timers = self._timers
        while timers:
            when, _, timer = heapq.heappop(timers)
            if timer.callback is not None:
                self.now = max(self.now, when)
                timer.callback(*timer.arguments)
