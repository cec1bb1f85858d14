"""A pseudo-terminal, and somebody before it."""

import os
import pty
import select
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from servers import PATIENCE, wait_for

# What is started leads a session that the terminal controls, as after a login.
_LOGIN = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)


class Terminal:
    """See the module."""

    def __init__(self) -> None:
        self._ours, self._theirs = pty.openpty()
        self._started: list[subprocess.Popen[bytes]] = []
        self._is_over = threading.Event()
        self._seen = b""
        self._at = 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def start(
        self, command: Sequence[str | Path], environment: Mapping[str, str], directory: Path
    ) -> "subprocess.Popen[bytes]":
        """Start a program in it."""
        process = subprocess.Popen(
            [sys.executable, "-c", _LOGIN, *command],
            cwd=directory,
            env={**environment, "TERM": "xterm"},
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def type(self, text: str) -> None:
        """Press keys; what is awaited afterwards is what comes behind."""
        self._at = len(self._seen)
        os.write(self._ours, text.encode())

    def wait(self, text: str) -> None:
        """Wait until a text appears, behind what was awaited before."""
        wait_for(lambda: text.encode() in self._seen[self._at :], what=lambda: (text, self.text))
        self._at = self._seen.index(text.encode(), self._at) + len(text.encode())

    @property
    def text(self) -> str:
        """All that has been shown."""
        return self._seen.decode(errors="replace")

    @property
    def echoes(self) -> bool:
        """Whether it shows what is typed, as it does when nobody has changed it."""
        return bool(termios.tcgetattr(self._ours)[3] & termios.ECHO)

    def close(self) -> None:
        """Wait for the end of what was started in it, and hang up."""
        for process in self._started:
            process.wait(PATIENCE)
        self.hang_up()

    def hang_up(self) -> None:
        """Be gone, like a connection that breaks."""
        self._is_over.set()
        self._reader.join(PATIENCE)  # as long as somebody reads, it stays
        os.close(self._theirs)
        os.close(self._ours)

    def _read(self) -> None:
        while not self._is_over.is_set():
            if select.select([self._ours], [], [], 0.02)[0]:
                self._seen += os.read(self._ours, 65536)
