"""The terminal of the server, which a worker with a debugged handler shares."""

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Terminal:
    """The terminal of this session, with its settings at construction.

    Raises:
        OSError: There is none.
    """

    def __init__(self) -> None:
        with _opened() as terminal:
            #: Whether this process is in its foreground, so that it receives Ctrl-C.
            self.is_ours = _is_ours(terminal)
            self._settings: list[Any] = termios.tcgetattr(terminal)

    def restore(self) -> None:
        """Restore the settings; a worker that ended at a prompt has switched the echo off."""
        with suppress(OSError), _opened() as terminal:  # it may be closed
            if _is_ours(terminal):  # a background process that sets it is stopped
                termios.tcsetattr(terminal, termios.TCSADRAIN, self._settings)


def _is_ours(terminal: int) -> bool:
    return os.tcgetpgrp(terminal) == os.getpgrp()


@contextmanager
def _opened() -> Iterator[int]:
    terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield terminal
    except termios.error as error:  # not a subclass of OSError
        raise OSError(*error.args) from error
    finally:
        os.close(terminal)
