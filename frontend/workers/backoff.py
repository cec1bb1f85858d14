"""How long a failed worker waits before its next start: TorchServe's series and window.

With one exception: a worker that was READY is replaced at once. What ended it (the kernel short of
memory, an operator, one bad request) is gone mostly, and its model has shown that it can be loaded.
Not so if it has failed only just before: a model that dies as soon as it is loaded would otherwise
be started as fast as the machine can.
"""

import math

# Fibonacci's. TorchServe's begins with a 0 that is never used: it moved on before it looked.
_SECONDS = (1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)
_CALM_SECONDS = 5.0


class Backoff:
    """The retry clock of one worker.

    The window opens at the first failure after a success; a failure inside it earns another try,
    one after it does not.

    Args:
        window: Seconds during which failures are retried; 0 retries nothing.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._index = 0
        self._opened: float | None = None
        self._has_loaded = False
        self._failed_at = -math.inf

    def failed(self, now: float) -> float | None:
        """Note a failure at ``now``; the seconds to wait before the next try, None for never."""
        was_well = self._has_loaded and now - self._failed_at >= _CALM_SECONDS
        self._has_loaded = False
        self._failed_at = now
        if self._opened is None:
            self._opened = now
        if self._window <= 0 or now - self._opened > self._window:
            return None
        return 0.0 if was_well else self._next_delay()

    def succeeded(self) -> None:
        """Note a successful load: the series starts anew."""
        self._index = 0
        self._opened = None
        self._has_loaded = True

    def given_up(self, now: float) -> bool:
        """Whether the current streak of failures has outlived the window."""
        return self._opened is not None and now - self._opened > self._window

    def _next_delay(self) -> float:
        delay = _SECONDS[min(self._index, len(_SECONDS) - 1)]
        self._index += 1
        return float(delay)
