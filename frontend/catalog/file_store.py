"""A catalog in a file, perhaps on a disk that several machines share.

Each read reads the whole file, which is small: its time and size do not always change with it, and
inotify does not report what another machine writes. The revision is a digest of the text.

The path of a directory means ``catalog.json`` in it, as in a mounted ConfigMap of Kubernetes.
"""

import asyncio
import hashlib
from pathlib import Path

from marserve.frontend.aio.background import DaemonThreads
from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.store import Document, StoreFailed
from marserve.frontend.errors import ServerBusy
from marserve.frontend.regular_files import open_file


class FileStore:
    """A catalog at a path."""

    def __init__(self, path: Path) -> None:
        self.place = str(path)
        self._path = path
        self._disk = DaemonThreads("the model catalog", 1, max_waiting=4)  # it may hang

    async def read(self, known: str = "") -> Document | None:
        """Read the file; its digest is the revision."""
        try:
            document = await asyncio.wrap_future(self._disk.submit(self._read))
        except OSError as error:
            where = error.filename or self._path
            raise StoreFailed(f"{error.strerror or error} ({where})") from error
        except ServerBusy as error:
            raise StoreFailed(f"the disk does not answer ({self._path})") from error
        return None if document.revision == known else document

    def _read(self) -> Document:
        path = self._path / "catalog.json" if self._path.is_dir() else self._path
        with open_file(path) as file:
            text = file.read(MAX_BYTES + 1)
        return Document(text, hashlib.sha256(text).hexdigest())
