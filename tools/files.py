"""Reading of user files for doctor and bench: regular files only, up to a size limit.

A pipe or a device may block or never end, and the size reported by the system may be wrong.
"""

import errno
from pathlib import Path
from typing import IO

from marserve.frontend.regular_files import NoFile, open_file

#: Bytes of a file with settings or code.
MAX_BYTES = 2 << 20


def open_regular(path: Path) -> IO[bytes]:
    """Open a regular file; raise OSError for any other file or an unreadable one."""
    try:
        return open_file(path)
    except (NoFile, ValueError):  # ValueError: a zero byte in its name
        raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None


def read_beginning(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read at most ``limit`` bytes of a regular file; raise as `open_regular` does."""
    with open_regular(path) as file:
        return file.read(limit) or b""  # None: a file of /proc that would block


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a regular file; raise OSError also for more than ``limit`` bytes."""
    content = read_beginning(path, limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit >> 20} MiB", str(path))
    return content
