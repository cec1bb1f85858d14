"""The working directory of a server, and how it is removed with the processes of the server.

It contains the unpacked archives. A server holds a lock (``flock``) on its directory while it
lives, and keeps the files from cleaners (`frontend.lifecycle.temporary_files`). All processes that
it starts have the path of the directory in their environment, which is a mark of
`started_processes`.

A server that stops kills the marked processes and removes the directory. For a server that was
killed, a *guard* does that: this file as a program, which waits for the lock. If the guard was
killed, too, the next server with the same temporary directory does it. A directory is removed only
if its name, its owner and a file in it are ours and its lock is free; links are not followed. The
file names the machine, because some network file systems lock for each machine separately.
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

#: Variable of all processes that a server starts: the path of its working directory.
VARIABLE = "MARSERVE_WORKDIR"

_PREFIX = "marserve-"
_MARK = ".owner-holds-a-lock"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def parent_directory() -> Path:
    """Return the parent of working directories: ``TEMP``, as in TorchServe, or ``TMPDIR``."""
    return Path(os.environ.get("TEMP") or tempfile.gettempdir()).absolute()


class WorkingDirectory:
    """The directory of this server, with its lock and its mark."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _open(path)
        self._claim()

    def keep(self) -> None:
        """Take the directory and the mark again if something has removed them; blocks."""
        make_again(self.path)
        if not _is_same(self.path, self._descriptor):
            logger.error("%s was removed, with what was unpacked in it.", self.path)
            before, self._descriptor = self._descriptor, _open(self.path)
            self._claim()
            os.close(before)  # the guard waits for this lock
        elif self._is_locked and not (self.path / _MARK).exists():
            self._write_mark()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._descriptor)

    def _claim(self) -> None:
        # Without a lock it gets no mark, so that other servers leave it. Some network file systems
        # have only shared locks of directories.
        self._is_locked = False
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            self._is_locked = True
            self._write_mark()

    def _write_mark(self) -> None:
        (self.path / _MARK).write_text("\n".join(_machine()))


def make_again(path: Path) -> None:
    """Make a working directory again if something has removed it.

    Raises:
        OSError: Another user has put something there, which must not be used.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.lstat().st_uid != os.geteuid() or path.is_symlink():
        raise OSError(f"{path} belongs to another user")


def touch_tree(root: Path) -> None:
    """Set the times of all files to now: cleaners of temporary files go by these; blocks.

    systemd-tmpfiles leaves a locked directory (tmpfiles.d(5)), others ignore locks.
    """
    _touch(root)
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            _touch(Path(folder, name))


def _touch(path: Path) -> None:
    with contextlib.suppress(OSError):  # removed meanwhile, or a handler has changed its owner
        os.utime(path, follow_symlinks=False)


@contextlib.contextmanager
def own_workdir() -> Iterator[WorkingDirectory]:
    """Create a private directory that marks all started processes; remove both at the end.

    Raises:
        OSError: It cannot be created; the text is for the operator.
    """
    parent = parent_directory()
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise OSError(
            f"Archives cannot be unpacked in {parent}: {error.strerror}. "
            "Set TEMP to a directory in which this user may write."
        ) from error
    directory = WorkingDirectory(path)
    try:
        os.environ[VARIABLE] = str(path)
        yield directory
    finally:
        os.environ.pop(VARIABLE, None)
        remove_with_processes(path)
        directory.close()


async def guard_workdir(path: Path) -> None:
    """Run a guard until cancelled; return if directories cannot be locked.

    Raises:
        OSError: It has ended, or could not be started.
    """
    import asyncio

    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        __file__,
        str(path),
        env={name: value for name, value in os.environ.items() if name != VARIABLE},
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # No deadline: it waits for the end of this process.
        if status := await process.wait():
            raise OSError(f"the guard of {path} has ended with status {status}")
        logger.warning("%s has no locks: a server that is killed leaves files there.", path.parent)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def remove_leftovers(parent: Path, seconds: float) -> None:
    """Remove directories of dead servers in a temporary directory; blocks up to ``seconds``."""
    deadline = time.monotonic() + seconds
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        if time.monotonic() > deadline:
            logger.warning("%s contains more directories of dead servers.", parent)
            return
        killed = clean(path)
        if killed is not None:
            logger.info("Removed %s and %d processes: its server is dead.", path, killed)


def clean(path: Path) -> int | None:
    """Remove the directory of a dead server, and kill its processes.

    Returns the number of processes; None if the directory is not ours or its server lives.
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
    except OSError:  # its server lives, or another process is removing it
        return None
    finally:
        os.close(descriptor)


def remove_with_processes(path: Path) -> int:
    """Kill the processes of a server, and remove its directory; return the number of processes."""
    killed = StartedProcesses().kill(f"{VARIABLE}={path}")
    for directory in (path / "models", path):  # the mark goes last
        shutil.rmtree(directory, ignore_errors=True)
    return killed


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _is_same(path: Path, descriptor: int) -> bool:
    return os.path.samestat(path.lstat(), os.fstat(descriptor))


def _is_marked(descriptor: int) -> bool:
    """Whether a directory and the mark in it are our own user's, and of this machine."""
    mark = os.stat(_MARK, dir_fd=descriptor, follow_symlinks=False)
    owners = {os.fstat(descriptor).st_uid, mark.st_uid}
    if owners != {os.geteuid()} or not stat.S_ISREG(mark.st_mode):
        return False
    with open(os.open(_MARK, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=descriptor)) as file:  # noqa: PTH123
        return not _machine().isdisjoint(file.read().split())


def _machine() -> set[str]:
    """Return what identifies this machine: its name, and the present run of its kernel."""
    names = {os.uname().nodename}
    with contextlib.suppress(OSError):
        names.add(_BOOT.read_text().strip())  # the same in all containers
    return names


def _guard(path: Path) -> None:
    with contextlib.suppress(OSError):  # it was removed, or cannot be locked
        is_current = False
        while not is_current:  # else the server has made it again
            descriptor = _open(path)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # no deadline: waits for the server
            is_current = _is_same(path, descriptor)
            os.close(descriptor)
        clean(path)


if __name__ == "__main__":
    _guard(Path(sys.argv[1]))
