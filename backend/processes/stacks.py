"""Where Python stood when a worker crashed, or while it hangs: written to a file by faulthandler.

A file and not standard error, which belongs to the handler: whoever reads it need not guess which
lines are the stack. The frontend keeps it in memory and opens it by a path, so that a child, a
command and the ranks of a runner all find it in the same way.

SIGQUIT asks a worker for its stacks and changes nothing else, as Java's virtual machines do it.
"""

import faulthandler
import logging
import os
import signal

logger = logging.getLogger(__name__)

_STDERR = 2


def record_stacks(path: str) -> None:
    """Have the stacks of all threads written to a file, after a fatal signal and at SIGQUIT.

    Children that a handler forks write theirs to standard error: they are not the worker's.

    Args:
        path: The file, which is appended to; where it is empty or cannot be opened, standard error
            gets the stacks.
    """
    _write_to(_opened(path))
    os.register_at_fork(after_in_child=_write_to_stderr)


def _opened(path: str) -> int:
    if not path:
        return _STDERR
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        logger.info("The stack of a crash will be on standard error: %s", error)
        return _STDERR


def _write_to(descriptor: int) -> None:
    faulthandler.enable(descriptor)
    faulthandler.register(signal.SIGQUIT, descriptor)


def _write_to_stderr() -> None:
    _write_to(_STDERR)
