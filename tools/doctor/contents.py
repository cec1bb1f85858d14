"""Reading an archive without unpacking it: names of members, and the texts of small files.

Weights are not read. A tar file has to be read from one end to the other, all others are fast at
any size.
"""

import math
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from marserve.backend.manifest import MANIFEST_PATH
from marserve.frontend.archives.unpack import (
    MAX_HEADER_BYTES,
    HeaderGuard,
    ShortReads,
    check_zip_member,
    is_zip,
    member_parts,
)
from marserve.frontend.errors import ServeError
from marserve.tools.files import MAX_BYTES, open_regular, read_file

#: Name, size in bytes, and the function that reads it.
_Member = tuple[str, int, Callable[[], bytes]]
_CHUNK_BYTES = 1 << 20
_MAX_TEXT = 64 << 20  # bytes of all such members together
_MAX_SECONDS = 60.0
_MAX_MEMBERS = 100_000
_READ = (".py", ".json", ".yaml", ".yml", ".txt")
# The errors of both libraries for bytes that are not an archive.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    OverflowError,
    RuntimeError,
    struct.error,
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
)


class NotAnArchive(Exception):
    """An archive that cannot be read; the text is the reason.

    Attributes:
        is_unrelated: Whether nothing marks the file as an archive of a model.
    """

    def __init__(self, why: str, *, is_unrelated: bool = False) -> None:
        super().__init__(why)
        self.is_unrelated = is_unrelated


@dataclass(frozen=True)
class Contents:
    """The members of an archive, by their path.

    Attributes:
        names: Paths of all files.
        texts: Contents of small text files.
        cut: Why reading stopped early; empty for an archive that was read completely.
    """

    names: frozenset[str]
    texts: Mapping[str, str] = field(default_factory=dict)
    cut: str = ""

    def has(self, name: str) -> bool:
        """Return whether a file or directory of this name exists."""
        return name in self.names or any(each.startswith(f"{name}/") for each in self.names)


def read_contents(path: Path) -> Contents:
    """Read the contents of an archive or an unpacked archive.

    Raises:
        NotAnArchive: The file is not an archive, or the server refuses it.
    """
    names: set[str] = set()
    texts: dict[str, str] = {}
    cut, held, deadline = "", 0, time.monotonic() + _MAX_SECONDS
    try:
        for name, size, read in _members(path, deadline):
            names.add(name)
            if len(names) > _MAX_MEMBERS:
                raise NotAnArchive(f"it has more than {_MAX_MEMBERS} members")
            if size <= MAX_BYTES and name.endswith(_READ):
                held += size
                texts[name] = read().decode("utf-8-sig", errors="replace")
            if held > _MAX_TEXT or time.monotonic() > deadline:
                break
    except (*_UNREADABLE, ServeError) as error:
        is_unrelated = path.suffix in (".gz", ".tgz") and MANIFEST_PATH not in names
        why = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
        raise NotAnArchive(why.rstrip("."), is_unrelated=is_unrelated) from error
    if held > _MAX_TEXT:
        cut = f"it has more than {_MAX_TEXT >> 20} MiB of code and settings"
    elif time.monotonic() > deadline:
        cut = f"it takes more than {_MAX_SECONDS:g} s"
    return Contents(frozenset(names), texts, cut)


@contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file; raise errors of ``zipfile``, or ServeError for too large an index."""
    with (
        open_regular(path) as file,
        ShortReads(file.fileno(), closefd=False) as guard,
        zipfile.ZipFile(guard) as archive,
    ):
        yield archive


def _members(path: Path, deadline: float) -> Iterator[_Member]:
    if path.is_dir():
        return _of_directory(path)
    return _of_zip(path) if is_zip(path) else _of_tar(path, deadline)


def _of_directory(path: Path) -> Iterator[_Member]:
    for each in sorted(islice(path.rglob("*"), 2 * _MAX_MEMBERS)):
        if each.exists() and not each.is_dir():  # skips broken links
            name = each.relative_to(path).as_posix()
            yield name, each.stat().st_size, partial(read_file, each)


def _of_zip(path: Path) -> Iterator[_Member]:
    with open_zip(path) as archive:
        for member in archive.infolist():
            check_zip_member(member)
            if not member.is_dir():
                name = "/".join(member_parts(member.filename))
                yield name, member.file_size, partial(_read_zipped, archive, member)


def _read_zipped(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    with archive.open(member) as file:  # limited, because its header may be wrong
        return file.read(MAX_BYTES)


def _of_tar(path: Path, deadline: float) -> Iterator[_Member]:
    with (
        open_regular(path) as packed,
        HeaderGuard(fileobj=packed) as guard,
        tarfile.open(fileobj=guard, mode="r|") as archive,
    ):
        for member in archive:
            parts = member_parts(member.name)
            name = "/".join(parts[1:] if len(parts) > 1 else parts)
            if member.issym() or member.islnk() or member.issparse():
                raise ValueError(f"a member is a link or a sparse file: {member.name[:200]}")
            guard.left = math.inf
            if (file := archive.extractfile(member)) is not None:
                yield name, member.size, file.read
                while file.read(_CHUNK_BYTES) and time.monotonic() < deadline:
                    pass  # a large member may exceed the deadline
            if time.monotonic() >= deadline:
                return
            guard.left = MAX_HEADER_BYTES
