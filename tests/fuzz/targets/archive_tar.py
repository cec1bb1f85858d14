"""An archive under any other name, a gzipped tar; unpacked into a directory.

Where the input is no gzip, it is the tar, and is compressed here: mutations of what is compressed
seldom get past its checksum.
"""

import gzip

from fuzz.limits import Limits
from fuzz.targets import archive_zip

LIMITS = Limits(calls=20_000, calls_per_byte=100, memory=24 << 20)


def target(data: bytes) -> None:
    """As for a zip."""
    packed = data if data.startswith(b"\x1f\x8b") else gzip.compress(data, 1, mtime=0)
    archive_zip.target(packed, "model.tar.gz")
