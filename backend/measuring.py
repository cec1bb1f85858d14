"""Optional measurements of the host: one that fails is absent, never an error.

Files of /proc and of control groups are blank or unreadable in some containers (lxcfs after a
restart, gVisor, hardened runtimes), and libraries raise almost anything for these.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: What has failed in this process; a module's state, as the log that it spares is one.
_failed: set[str] = set()


def measure(what: str, read: Callable[[], T]) -> T | None:
    """Return a measurement, or None if it fails; the first failure of ``what`` is logged."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - any, from blank files
        if what not in _failed:
            _failed.add(what)
            kind = type(error).__name__
            logger.warning("%s is unknown, and left out from now on: %s: %s", what, kind, error)
        return None
