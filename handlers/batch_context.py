"""`self.context` of a handler, when several batches are under way.

Handlers read ``self.context`` wherever they like, and mean the batch they are at. While stages of
several batches overlap, each of them runs in a thread of its own, and so the attribute has a value
for each thread that has set it. A thread that has not, one the handler started by itself, gets what
was set last.

Until `overlap` is called it is a plain attribute: set anywhere, seen everywhere.
"""

import threading
from typing import Any

_NAME = "context"
_BY_THREAD = "_context_by_thread"


class BatchContext:
    """The descriptor; an instance keeps the value set last under the attribute's own name."""

    def __get__(self, handler: Any, _owner: type) -> Any:
        if handler is None:
            return self
        held = handler.__dict__
        if _BY_THREAD in held:
            return getattr(held[_BY_THREAD], _NAME, held.get(_NAME))
        try:
            return held[_NAME]
        except KeyError:
            message = f"{type(handler).__name__!r} object has no attribute {_NAME!r}"
            raise AttributeError(message) from None

    def __set__(self, handler: Any, value: Any) -> None:
        held = handler.__dict__
        held[_NAME] = value
        if _BY_THREAD in held:
            setattr(held[_BY_THREAD], _NAME, value)


def overlap(handler: Any) -> None:
    """Let each thread have a context of its own from now on."""
    handler.__dict__.setdefault(_BY_THREAD, threading.local())
