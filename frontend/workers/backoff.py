"""How long a failed worker waits before its next start: TorchServe's series and window."""

_SECONDS = (0, 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610, 987, 1597)


class Backoff:
    """The retry clock of one worker.

    The series is Fibonacci's; its first entry is never used, because TorchServe moved on before it
    looked. The window opens at the first failure after a success; a failure inside it earns another
    try, one after it does not.

    Args:
        window: Seconds during which failures are retried; 0 retries nothing.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._index = 0
        self._opened: float | None = None

    def failed(self, now: float) -> float | None:
        """Note a failure at ``now``; the seconds to wait before the next try, None for never."""
        if self._opened is None:
            self._opened = now
        if self._window <= 0 or now - self._opened > self._window:
            return None
        self._index = min(self._index + 1, len(_SECONDS) - 1)
        return float(_SECONDS[self._index])

    def succeeded(self) -> None:
        """Note a successful load: the series starts anew."""
        self._index = 0
        self._opened = None

    def given_up(self, now: float) -> bool:
        """Whether the current streak of failures has outlived the window."""
        return self._opened is not None and now - self._opened > self._window
