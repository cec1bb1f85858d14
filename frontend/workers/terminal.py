"""The terminal of the server, which a worker whose handler is debugged reads and writes."""

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class Terminal:
    """The terminal of this session, as it is set now; OSError where there is none.

    ``is_ours``: we are in its foreground, and what is typed reaches us, Ctrl-C too.
    """

    def __init__(self) -> None:
        with _opened() as terminal:
            self.is_ours = _is_ours(terminal)
            self._settings: list[Any] = termios.tcgetattr(terminal)

    def restore(self) -> None:
        """Set it to what it was: a worker that ended at a prompt left it without an echo."""
        with suppress(OSError), _opened() as terminal:  # it may be gone by now
            if _is_ours(terminal):  # whoever sets it from the background is stopped
                termios.tcsetattr(terminal, termios.TCSADRAIN, self._settings)


def _is_ours(terminal: int) -> bool:
    return os.tcgetpgrp(terminal) == os.getpgrp()


@contextmanager
def _opened() -> Iterator[int]:
    terminal = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
    try:
        yield terminal
    except termios.error as error:  # which is none, as it happens
        raise OSError(*error.args) from error
    finally:
        os.close(terminal)
