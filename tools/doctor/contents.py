"""What is in an archive, read without unpacking it: names, and the few small files that say much.

Weights stay where they are; an archive of many gigabytes is read in a moment, unless it is a tar,
which has to be read from one end to the other.
"""

import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from marserve.backend.manifest import MANIFEST_PATH
from marserve.frontend.errors import ServeError
from marserve.frontend.models.archives.unpack import member_parts

#: Name, size, and what reads it.
_Member = tuple[str, int, Callable[[], bytes]]
_MAX_BYTES = 2 << 20
_MAX_TEXT = 64 << 20  # of all such members together
_MAX_SECONDS = 60.0
_MAX_MEMBERS = 100_000
_READ = (".py", ".json", ".yaml", ".yml", ".txt")
# What the two libraries raise at bytes that are no archive.
_UNREADABLE = (
    *(OSError, EOFError, ValueError, LookupError, OverflowError, RuntimeError, struct.error),
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error),
)


class NotAnArchive(Exception):
    """It cannot be read; the text says why.

    Attributes:
        is_anybodys: Whether nothing in it says that it is an archive of a model.
    """

    def __init__(self, why: str, *, is_anybodys: bool = False) -> None:
        super().__init__(why)
        self.is_anybodys = is_anybodys


@dataclass(frozen=True)
class Contents:
    """The members of an archive, by their path in it.

    Attributes:
        names: Of files.
        texts: Of the small ones that are text.
        cut: Why not all of it was read; empty where all was.
    """

    names: frozenset[str]
    texts: Mapping[str, str] = field(default_factory=dict)
    cut: str = ""

    def has(self, name: str) -> bool:
        """Whether there is a file, or a directory, of this name."""
        return name in self.names or any(each.startswith(f"{name}/") for each in self.names)


def read_contents(path: Path) -> Contents:
    """The contents of an archive or of an unpacked one.

    Raises:
        NotAnArchive: It is none, or one that the server refuses.
    """
    names: set[str] = set()
    texts: dict[str, str] = {}
    cut, held, deadline = "", 0, time.monotonic() + _MAX_SECONDS
    try:
        members = _members(path)
        for name, size, read in members:
            names.add(name)
            if len(names) > _MAX_MEMBERS:
                raise NotAnArchive(f"it has more than {_MAX_MEMBERS} members")
            if size <= _MAX_BYTES and name.endswith(_READ):
                held += size
                texts[name] = read().decode("utf-8-sig", errors="replace")
            if held > _MAX_TEXT:
                cut = f"it has more than {_MAX_TEXT >> 20} MiB of code and settings"
            elif time.monotonic() > deadline:
                cut = f"it takes more than {_MAX_SECONDS:g} s"
            if cut:
                break
    except (*_UNREADABLE, ServeError) as error:
        is_anybodys = path.suffix in (".gz", ".tgz") and MANIFEST_PATH not in names
        why = str(error) or type(error).__name__
        raise NotAnArchive(why, is_anybodys=is_anybodys) from error
    return Contents(frozenset(names), texts, cut)


def _members(path: Path) -> Iterator[_Member]:
    if path.is_dir():
        return _of_directory(path)
    is_zip = path.suffix in (".mar", ".war")
    return _of_zip(path) if is_zip else _of_tar(path)


def _of_directory(path: Path) -> Iterator[_Member]:
    for each in sorted(path.rglob("*")):
        if each.is_file():
            name = each.relative_to(path).as_posix()
            yield name, each.stat().st_size, each.read_bytes


def _of_zip(path: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = "/".join(member_parts(member.filename))
            if not member.is_dir():
                yield name, member.file_size, partial(archive.read, member)


def _of_tar(path: Path) -> Iterator[_Member]:
    with tarfile.open(path, "r|gz") as archive:
        for member in archive:
            parts = member_parts(member.name)
            name = "/".join(parts[1:] if len(parts) > 1 else parts)
            if member.issym() or member.islnk():
                raise ValueError(f"a member is a link: {member.name[:200]}")
            if member.isreg():
                file = archive.extractfile(member)
                yield name, member.size, file.read if file else bytes
