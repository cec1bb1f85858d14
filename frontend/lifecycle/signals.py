"""The signals of a running server, turned into events.

    SIGTERM, SIGINT   Stop: wait for balancers to notice, then finish accepted requests.
    again             Do not wait for balancers; after a third SIGINT (Ctrl-C) nor for requests.
    SIGHUP            Read files again; if the terminal was closed, stop.

Accepted requests are finished even after a second SIGTERM, because process managers repeat it. A
user who types Ctrl-C again has seen what the server waits for. Under nohup SIGHUP stays ignored.

The handlers are Python's, not the event loop's, which are removed when the loop is closed: until
the end of the process a repeated SIGTERM would then interrupt the removal of files.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType


class Signals:
    """Turns signals into events, from its creation in the running event loop on.

    ``leaves_interrupts`` returns whether SIGINT is left to a worker at the terminal. ``on_stop`` is
    called as soon as a signal requests a stop, even while the event loop is blocked.
    """

    def __init__(
        self,
        reload: Callable[[], None],
        leaves_interrupts: Callable[[], bool],
        on_stop: Callable[[], object] = lambda: None,
    ) -> None:
        self.stop = asyncio.Event()  # the server stops
        self.skip_balancers = asyncio.Event()  # it does not wait for balancers any longer
        self.skip_requests = asyncio.Event()  # nor for accepted requests
        self._reload = reload
        self._leaves_interrupts = leaves_interrupts
        self._on_stop_asked = on_stop
        self._has_terminal = _has_terminal()
        self._loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Called between any two instructions of the main thread: it only wakes the loop."""
        if self._asks_for_stop(number):
            self._on_stop_asked()
        act = self._on_hangup if number == signal.SIGHUP else self._on_stop
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
            self._loop.call_soon_threadsafe(act, number)

    def _asks_for_stop(self, number: int) -> bool:
        if number == signal.SIGINT:
            return not self._leaves_interrupts()
        return number == signal.SIGTERM

    def _on_stop(self, number: int) -> None:
        if not self.stop.is_set():
            if self._asks_for_stop(number):
                self.stop.set()
        elif not self.skip_balancers.is_set():
            self.skip_balancers.set()
        elif number == signal.SIGINT:
            self.skip_requests.set()

    def _on_hangup(self, _number: int) -> None:
        if self._has_terminal and not _has_terminal():
            self.stop.set()
        else:
            self._reload()


def ignore_signals() -> None:
    """Ignore the signals until the process has ended.

    The interpreter's end would restore their default action, which kills the process.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal that still exists."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
