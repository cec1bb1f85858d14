"""The terminal of the server, which a worker whose handler is debugged reads and writes."""

import os
import termios
from typing import Any


class Terminal:
    """The terminal of this session.

    Raises:
        OSError: There is none, or it is another program's at the moment.
    """

    def __init__(self) -> None:
        self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_CLOEXEC)
        self._settings: list[Any] = termios.tcgetattr(self._descriptor)

    @property
    def is_ours(self) -> bool:
        """Whether we are in its foreground: what is typed reaches us, and Ctrl-C too."""
        return os.tcgetpgrp(self._descriptor) == os.getpgrp()

    def restore(self) -> None:
        """Set it to what it was: a worker that ended at a prompt left it without an echo."""
        if self.is_ours:  # whoever sets it from the background is stopped
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._settings)

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)
