"""A catalog in a file, perhaps on a disk that several machines share.

Each read reads the whole file, which is small: its time and size do not always change with it, and
inotify does not report what another machine writes. The revision is a digest of the text.

Writers lock a file beside it (``flock``, which network file systems support), compare the revision,
and rename a new file over the old one, so that readers never see an incomplete file.

The path of a directory means ``catalog.json`` in it. A ConfigMap of Kubernetes is such a directory,
with a link ``..data`` to the current files; it must not be written.
"""

import asyncio
import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from marserve.frontend.aio.background import DaemonThreads
from marserve.frontend.atomic_file import replace_file
from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.store import Document, StoreConflict, StoreFailed
from marserve.frontend.errors import ServerBusy
from marserve.frontend.regular_files import open_file

T = TypeVar("T")


class FileStore:
    """A catalog at a path; a writer waits up to ``lock_seconds`` for others."""

    def __init__(self, path: Path, lock_seconds: float) -> None:
        self.place = str(path)
        self._path = path
        self._lock_seconds = lock_seconds
        # Two threads, so that reads do not wait for a write.
        self._disk = DaemonThreads("the model catalog", 2, max_waiting=4)

    async def why_read_only(self) -> str:
        """Return a reason for a mounted ConfigMap, or an unwritable directory."""
        return await self._run(self._why_read_only)

    async def read(self, known: str = "") -> Document | None:
        """Read the file; its digest is the revision."""
        document = await self._run(self._read)
        return None if document.revision == known else document

    async def write(self, text: bytes, revision: str) -> str:
        """Replace the file under its lock."""
        return await self._run(self._write, text, revision)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a function in a daemon thread, because the disk may hang."""
        try:
            return await asyncio.wrap_future(self._disk.submit(function, *arguments))
        except OSError as error:
            where = error.filename or self._path
            raise StoreFailed(f"{error.strerror or error} ({where})") from error
        except ServerBusy as error:
            raise StoreFailed(f"the disk does not answer ({self._path})") from error

    def _file(self) -> Path:
        return self._path / "catalog.json" if self._path.is_dir() else self._path

    def _why_read_only(self) -> str:
        file = self._file()
        if (file.parent / "..data").is_symlink():
            return "it is a mounted ConfigMap or Secret"
        directory = file.resolve().parent
        if not directory.is_dir():
            return ""  # it may be created later
        return "" if os.access(directory, os.W_OK) else f"{directory} cannot be written"

    def _read(self) -> Document:
        with open_file(self._file()) as file:
            text = file.read(MAX_BYTES + 1)
        return Document(text, hashlib.sha256(text).hexdigest())

    def _write(self, text: bytes, revision: str) -> str:
        file = self._file().resolve()  # a link stays a link
        with self._locked(file):
            if self._read().revision != revision:
                raise StoreConflict
            replace_file(file, text, mode=file.stat().st_mode & 0o7777)
        return hashlib.sha256(text).hexdigest()

    @contextlib.contextmanager
    def _locked(self, file: Path) -> Iterator[None]:
        """Hold the writers' lock, which the kernel releases when the process ends."""
        descriptor = os.open(file.with_name(f".{file.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            deadline = time.monotonic() + self._lock_seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise StoreFailed("others are writing it all the time") from error
                    time.sleep(0.02)
            yield
        finally:
            os.close(descriptor)
