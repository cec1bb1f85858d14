"""A model of 20 ms a batch, whatever its size, that raises for some requests and dies of others.

Where and how it raises is told by the model's name: ``loop`` or ``any``, before or after the 20 ms.
"""

import os
import signal
import time
from typing import Any

SECONDS = 0.02


def handle(data: Any, context: Any) -> Any:
    """Initialise (``data`` is None), or answer a batch."""
    if data is None:
        return None
    how, _, when = context.manifest["model"]["modelName"].partition("_")
    check = {"loop": _check_each, "any": _check_all}[how]
    if when == "before":
        check(data)
    time.sleep(SECONDS)
    if when == "after":
        check(data)
    return [b"done"] * len(data)


def _check_each(data: Any) -> None:
    for row in data:
        _check(bytes(row["body"]))


def _check_all(data: Any) -> None:
    if any(row["body"].startswith(b"bad") for row in data):
        raise ValueError("one of these is bad")
    _check_each(data)


def _check(body: bytes) -> None:
    if body.startswith(b"bad"):
        raise ValueError("this is bad")
    if body.startswith(b"exit"):
        os._exit(3)
    if body.startswith(b"segv"):
        os.kill(os.getpid(), signal.SIGSEGV)
