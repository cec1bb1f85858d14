"""What a detached server reports to its starter: one JSON document through a pipe.

The server writes it when it listens or has to give up; one that dies first closes the pipe without
a word. The starter waits for either, but not for ever: models may take minutes to fetch and unpack.
"""

import contextlib
import json
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass

# A pipe holds much more: the server never waits for its starter.
_MAX_NAMES = 10
_MAX_CHARACTERS = 2000
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Outcome:
    """What became of a start.

    Attributes:
        url: Where the server listens; empty if it does not.
        loading: Models that cannot answer yet, the first of them.
        error: Why it gave up; empty where that is not known.
        failed: Models that could not be loaded, the first of them.
    """

    url: str = ""
    loading: tuple[str, ...] = ()
    error: str = ""
    failed: tuple[str, ...] = ()


class StartReport:
    """The server's end.

    Args:
        descriptor: Of the pipe; None where nobody waits.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = descriptor
        if descriptor is not None:
            os.set_inheritable(descriptor, False)  # a worker must not keep the pipe open

    def listening(self, url: str, loading: Sequence[str], failed: Sequence[str] = ()) -> None:
        """Report that the server listens."""
        names = {"loading": list(loading[:_MAX_NAMES]), "failed": list(failed[:_MAX_NAMES])}
        self._send({"url": url, **names})

    def failed(self, error: str) -> None:
        """Report why there will be no server."""
        self._send({"error": error[:_MAX_CHARACTERS]})

    def _send(self, members: dict[str, object]) -> None:
        if self._descriptor is None:
            return
        descriptor, self._descriptor = self._descriptor, None
        with contextlib.suppress(BrokenPipeError), open(descriptor, "wb") as pipe:  # noqa: PTH123 - a descriptor is no path
            pipe.write(json.dumps(members).encode())


def wait_for_outcome(descriptor: int, timeout: float) -> Outcome | None:
    """The starter's end.

    Args:
        descriptor: Of the pipe.
        timeout: Seconds to wait.

    Returns:
        What became of it; None while that is open.
    """
    deadline = time.monotonic() + timeout
    received = b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(descriptor, _READ_BYTES)
        received += piece
        if not piece:
            members = json.loads(received or b"{}")
            return Outcome(
                members.get("url", ""),
                tuple(members.get("loading", ())),
                members.get("error", ""),
                tuple(members.get("failed", ())),
            )
    return None
