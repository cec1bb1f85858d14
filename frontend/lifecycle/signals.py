"""The signals of a running server, turned into events.

    SIGTERM, SIGINT   Stop: first balancers may notice, then accepted requests are finished.
    again             Stop waiting for balancers; Ctrl-C (SIGINT) a further time: nor for requests.
    SIGHUP            Read files again, unless the terminal was closed: then stop.

Accepted requests are finished even after a second SIGTERM, because process managers repeat it. A
user who types Ctrl-C again has seen what the server waits for. Under nohup SIGHUP stays ignored.

The handlers are Python's and not the event loop's, which takes its own away when it is closed: from
then to the end of the process a repeated SIGTERM would kill what is cleaning up.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType


class Signals:
    """Turns signals into events, from construction on; needs the running event loop.

    ``on_stop`` is called as soon as a signal asks for a stop, even while the event loop is held up.
    """

    def __init__(
        self,
        reload: Callable[[], None],
        leaves_interrupts: Callable[[], bool],
        on_stop: Callable[[], object] = lambda: None,
    ) -> None:
        self.stop = asyncio.Event()  # the server is to stop
        self.skip_balancers = asyncio.Event()  # without waiting for balancers, or no longer
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
        """Between any two instructions of the main thread, so it does little but wake the loop."""
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
    """Ignore the signals of a server that has stopped, until the process is gone.

    The interpreter's end would give them back their default action, which is to kill.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal that is still there."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
