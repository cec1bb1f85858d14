"""Reads files whose paths another program may have replaced, such as by a pipe.

To open a pipe or a device, or to read it, may block without end.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO

#: Bytes of a file with keys, certificates or settings.
MAX_BYTES = 4 << 20
_PIECE_BYTES = 1 << 16


class NoFile(OSError):
    """Not a regular file."""

    def __init__(self) -> None:
        super().__init__("is no file")
        self.strerror = "it is no file"


def open_file(path: Path, *, follow: bool = True) -> IO[bytes]:
    """Open a regular file for reading; raises NoFile for a pipe, a device and the like.

    Without ``follow`` a link is an OSError.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NoFile
    return os.fdopen(descriptor, "rb")


def read_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """Read a regular file; raises OSError also for more than ``limit`` bytes."""
    content = b""
    with open_file(path) as file:
        # In pieces, since a read allocates what it is asked for.
        while len(content) <= limit and (piece := file.read(min(_PIECE_BYTES, limit + 1))):
            content += piece
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it is longer than {limit} bytes", str(path))
    return content
