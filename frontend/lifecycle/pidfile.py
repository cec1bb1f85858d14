"""The pid file: one server per temporary directory.

The file contains the decimal pid and nothing else, as TorchServe's: scripts read it. The server
holds a lock (``flock``) on it while it lives; the kernel releases it with the process. A file
without a lock is an orphan, unless its process is TorchServe's own server (Java), which takes no
lock.

The starter of a detached server takes the lock and lets the server inherit it, so that ``--stop``
right after ``--start`` finds the server, and one of two starters is refused. A server whose file
something has removed, such as a cleaner of /tmp, is found by its descriptor, and makes it again.
"""

import contextlib
import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from marserve.frontend.measurements import UNREADABLE

# TorchServe's text, for scripts.
_ALREADY_RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
# The main class of TorchServe's server, by which its own commands recognise it.
_JAVA_CLASS = "org.pytorch.serve.ModelServer"
_SECOND = "A second server needs another TMPDIR, directory and addresses: docs/second-server.md."


class PidFileError(Exception):
    """The pid file cannot be used; the text is for the operator."""


class PidFile:
    """The pid file of one server, by default where TorchServe has it, below ``TMPDIR``.

    It cannot be used if it belongs to another user or cannot be opened (PidFileError).
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or _temporary_directory() / ".model_server.pid"
        self._descriptor: int | None = None
        self._changing = threading.Lock()  # a thread keeps the file, another releases it

    def read(self) -> int | None:
        """Return the pid of the living server, also of one whose file is gone; None without one."""
        pid, is_locked = self._look()
        return pid if is_locked else self._holder_of_removed()

    def read_java(self) -> int | None:
        """Return the pid of TorchServe's own living server; None without one."""
        pid, is_locked = self._look()
        return pid if pid is not None and not is_locked and _is_java(pid) else None

    def claim(self) -> bool:
        """Take the file for this process; return whether a dead server had left it.

        Raises:
            PidFileError: A living server has it, ours or TorchServe's own.
        """
        descriptor = self._lock_current()
        pid = _pid_in(descriptor)
        if pid is not None and _is_java(pid):
            os.close(descriptor)
            server = ", ".join(_details(pid))
            raise PidFileError(
                f"{_ALREADY_RUNNING}\nIt is TorchServe's Java server: {server}.\n"
                f"Stop it first: kill {pid}\n{_SECOND}"
            )
        if holder := self._holder_of_removed():
            if not os.fstat(descriptor).st_size:  # it was made by this call
                self.path.unlink()
            os.close(descriptor)
            details = ", ".join(_details(holder))
            raise PidFileError(f"{_ALREADY_RUNNING}\nIt has {details}.\n{_SECOND}")
        self._descriptor = descriptor
        is_orphan = os.fstat(descriptor).st_size > 0
        self._write(os.getpid())
        return is_orphan

    def fileno(self) -> int:
        """Return the descriptor of a claimed file, for a child to inherit."""
        assert self._descriptor is not None, "claim() comes first"
        return self._descriptor

    def hand_over(self, pid: int) -> None:
        """Leave a claimed file to a child that inherited `fileno`."""
        self._write(pid)
        self._close()

    def adopt(self, descriptor: int) -> None:
        """Take the file that the parent of this process has claimed for it."""
        if not self._is_current(descriptor):
            raise PidFileError(f"Descriptor {descriptor} is not the pid file {self.path}")
        os.set_inheritable(descriptor, False)  # a worker must not keep the lock alive
        self._descriptor = descriptor

    def keep(self) -> None:
        """Touch the file of this process; make it again if something has removed it."""
        with self._changing:
            if self._descriptor is None:
                return
            if self._is_current(self._descriptor):
                os.utime(self._descriptor)
                return
            try:
                descriptor = self._open(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:  # another process claims it, finds this one, and removes it
                return
            _lock(descriptor, fcntl.LOCK_EX)
            self._close()
            self._descriptor = descriptor
            self._write(os.getpid())

    def release(self) -> None:
        """Remove the file, if this process holds it."""
        with self._changing:
            if self._descriptor is None:
                return
            if self._is_current(self._descriptor):
                self.path.unlink()  # before the lock is released: no other process can claim it yet
            self._close()

    def _holder_of_removed(self) -> int | None:
        """Return the pid of a server of this user that holds the file after its removal.

        The kernel names the file that a descriptor had. The same path in another container is
        another file.
        """
        gone = f"{Path(os.path.realpath(self.path.parent), self.path.name)} (deleted)"
        with contextlib.suppress(OSError):
            namespace = Path("/proc/self/ns/mnt").readlink()
            for process in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208 - names
                if int(process) != os.getpid() and _holds(Path("/proc", process), gone, namespace):
                    return int(process)
        return None

    def _look(self) -> tuple[int | None, bool]:
        """Return the pid in the file, and whether a process has locked it."""
        try:
            descriptor = self._open(os.O_RDONLY)
        except FileNotFoundError:
            return None, False
        try:
            is_locked = not _lock(descriptor, fcntl.LOCK_SH)
            return _pid_in(descriptor), is_locked
        finally:
            os.close(descriptor)

    def _lock_current(self) -> int:
        # Ends: a further round means that another server ended meanwhile.
        while True:
            descriptor = self._open(os.O_RDWR | os.O_CREAT)
            if not _lock(descriptor, fcntl.LOCK_EX):
                os.close(descriptor)
                details = ", ".join(_details(self.read()))
                raise PidFileError(f"{_ALREADY_RUNNING}\nIt has {details}.\n{_SECOND}")
            if self._is_current(descriptor):
                return descriptor
            os.close(descriptor)  # its owner removed it between open and lock

    def _open(self, flags: int) -> int:
        """Open the file; refuse links and files of other users, who share the directory."""
        try:
            descriptor = os.open(self.path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except (FileExistsError, FileNotFoundError):
            raise
        except OSError as error:
            raise PidFileError(
                f"Cannot open the pid file {self.path} ({error.strerror}). "
                "Set TMPDIR to a directory of your own."
            ) from error
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            os.close(descriptor)
            raise PidFileError(f"The pid file {self.path} belongs to another user.")
        if not stat.S_ISREG(status.st_mode):  # a read of a pipe would not end
            os.close(descriptor)
            raise PidFileError(f"The pid file {self.path} is not a regular file.")
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.path.lstat())
        except OSError:
            return False

    def _write(self, pid: int) -> None:
        os.ftruncate(self.fileno(), 0)
        os.pwrite(self.fileno(), str(pid).encode(), 0)

    def _close(self) -> None:
        os.close(self.fileno())
        self._descriptor = None


def _holds(process: Path, file: str, namespace: Path) -> bool:
    """Whether a process has locked a file, which its descriptors name so, in a mount namespace."""
    with contextlib.suppress(OSError):  # of another user, or ended
        if (process / "ns/mnt").readlink() != namespace:
            return False
        for descriptor in os.listdir(process / "fd"):  # noqa: PTH208 - names
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(process / "fd" / descriptor) == file:  # noqa: PTH115 - a text
                    return "FLOCK" in (process / "fdinfo" / descriptor).read_text()
    return False


def _pid_in(descriptor: int) -> int | None:
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.isdigit() else None


def _is_java(pid: int) -> bool:
    try:
        return _JAVA_CLASS in psutil.Process(pid).cmdline()
    except UNREADABLE:  # it has ended
        return False


def _details(pid: int | None) -> Iterator[str]:
    """Yield what the kernel contains about a server: its pid, directory and addresses."""
    if pid is None:  # it writes its pid at this moment
        yield "no pid yet"
        return
    yield f"pid {pid}"
    with contextlib.suppress(*UNREADABLE):  # it ends, or it is in another container
        yield f"directory {psutil.Process(pid).cwd()}"
        places = {
            f"{each.laddr.ip}:{each.laddr.port}"
            for each in psutil.net_connections("tcp")
            if each.pid == pid and each.status == psutil.CONN_LISTEN and each.laddr
        }
        if places:
            yield f"addresses {' '.join(sorted(places))}"


def _temporary_directory() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError as error:
        raise PidFileError(
            f"The pid file needs a directory in which this user may write: {error.strerror}. "
            "Set TMPDIR, or mount one there (where the root is read-only, a tmpfs)."
        ) from error


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
