"""The one way in which doctor and bench read files of others: regular ones, up to a limit.

A pipe or a device may have no end, or never begin; the size that the system states may be wrong.
"""

import errno
from pathlib import Path
from typing import IO

from marserve.frontend.archives.local_files import NoFile, open_file

#: Bytes of a file with settings or code.
MAX_BYTES = 2 << 20


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file; OSError where it is none, or cannot be read."""
    try:
        return open_file(path)
    except (NoFile, ValueError):  # ValueError: a zero byte in its name
        raise OSError(errno.EINVAL, "it is no regular file", str(path)) from None


def read_beginning(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read at most ``limit`` bytes of a regular file; raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read(limit) or b""  # None: one of /proc that would keep its reader waiting


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a regular file; OSError also where it is longer than ``limit`` bytes."""
    content = read_beginning(path, limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit >> 20} MiB", str(path))
    return content
