"""The working directory of a server, and how it is removed with the processes of the server.

Unpacked archives lie there. A server holds a lock (``flock``) on its directory while it lives; the
kernel drops it with the process, however that ends. All that a server starts (workers and what
their handlers start, torchrun and its ranks, pip) has the path of the directory in its environment,
which is a mark of `started_processes`.

A server that stops kills what has the mark and removes the directory. For a server that was killed,
a *guard* does it, a process of its own that waits for the lock. Where the guard was killed too, or
the machine went down, the next server with the same temporary directory does it. Only directories
are touched that are ours by name, owner and a file in them, and whose lock is free; links are not
followed. The file names the machine, because on some network file systems each machine has locks of
its own.

The guard runs this file as a program.
"""

import contextlib
import fcntl
import logging
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from marserve.frontend.lifecycle.started_processes import StartedProcesses

logger = logging.getLogger(__name__)

#: Of the environment of all that a server starts: the path of its working directory.
VARIABLE = "MARSERVE_WORKDIR"

_PREFIX = "marserve-"
_MARK = ".owner-holds-a-lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def parent_directory() -> Path:
    """Where working directories lie: in ``TEMP``, TorchServe's variable, or ``TMPDIR``."""
    return Path(os.environ.get("TEMP") or tempfile.gettempdir()).absolute()


@contextlib.contextmanager
def own_workdir() -> Iterator[Path]:
    """Make a private directory that is gone when the server is, and mark all it starts with it.

    Raises:
        OSError: It cannot be made; the text is for the operator.
    """
    parent = parent_directory()
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise OSError(
            f"Archives cannot be unpacked in {parent}: {error.strerror}. "
            "Set TEMP to a directory in which this user may write."
        ) from error
    descriptor = _open(path)
    try:
        # Where there are no locks there is no mark, and nobody else removes it. Shared, because
        # some network file systems lock directories no other way: there, too.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            (path / _MARK).write_text("\n".join(_machine()))
        os.environ[VARIABLE] = str(path)
        yield path
    finally:
        os.environ.pop(VARIABLE, None)
        remove_with_processes(path)
        os.close(descriptor)


async def guard_workdir(path: Path) -> None:
    """Run a guard; returns where there can be none.

    Raises:
        OSError: It has ended, or could not be started.
    """
    import asyncio

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", __file__, str(path)),
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # No deadline: it waits for the end of this process.
        if status := await process.wait():
            raise OSError(f"the guard of {path} has ended with status {status}")
        logger.warning("There are no locks in %s: a kill would leave things there.", path.parent)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def remove_leftovers(parent: Path, seconds: float) -> None:
    """Remove what dead servers have left in a temporary directory; blocks.

    After ``seconds`` the rest is left to the next one.
    """
    deadline = time.monotonic() + seconds
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        if time.monotonic() > deadline:
            logger.warning("There is more in %s that dead servers have left.", parent)
            return
        killed = clean(path)
        if killed is not None:
            logger.info("Removed %s and %d processes: its server is dead.", path, killed)


def clean(path: Path) -> int | None:
    """Kill what a dead server had started, and remove its directory.

    Returns how many processes there were; None where it is not ours or its server lives.
    """
    try:
        descriptor = _open(path)
    except OSError:
        return None
    try:
        if not _is_marked(descriptor):
            return None
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove_with_processes(path)
    except OSError:  # its server lives, or somebody else is at it
        return None
    finally:
        os.close(descriptor)


def remove_with_processes(path: Path) -> int:
    """Kill what a server has started, and remove its directory; returns how many there were."""
    killed = StartedProcesses().kill(f"{VARIABLE}={path}")
    for directory in (path / "models", path):  # the mark goes last
        shutil.rmtree(directory, ignore_errors=True)
    return killed


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_marked(descriptor: int) -> bool:
    """Whether a directory and the mark in it are our own user's, and of this machine."""
    mark = os.stat(_MARK, dir_fd=descriptor, follow_symlinks=False)
    owners = {os.fstat(descriptor).st_uid, mark.st_uid}
    if owners != {os.geteuid()} or not stat.S_ISREG(mark.st_mode):
        return False
    with open(os.open(_MARK, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor)) as file:  # noqa: PTH123
        return not _machine().isdisjoint(file.read().split())


def _machine() -> set[str]:
    """What tells this machine from others: either its name, or the present run of its kernel."""
    names = {os.uname().nodename}
    with contextlib.suppress(OSError):
        names.add(_BOOT.read_text().strip())  # the same in all containers
    return names


def _guard(path: Path) -> None:
    with contextlib.suppress(OSError):  # it is gone already, or cannot be locked
        descriptor = _open(path)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # no deadline: it waits for the end of the server
        os.close(descriptor)
        clean(path)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
