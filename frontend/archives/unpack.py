"""Untrusted archive file → directory, or a refusal that leaves nothing behind.

Two formats exist: a zip when the file's name ends as its kind's do (``.mar`` of models, ``.war`` of
workflows), a gzipped tar under any other name (of its members the first path component is cut off).
What makes unpacking safe:

* Only plain files and directories are ever created, in a fresh directory that nobody else knows,
  and every file is opened with ``x``. So no link can lead outside, and of two members with one
  name, or names that the file system takes for one, the second is refused instead of winning.
* Names are judged as they stand in the archive, before anything is cut off or normalised.
* Nothing a header declares is believed: bytes are counted as they are written.

Bombs. A fixed size limit would be wrong, models may be tens of gigabytes. Three limits together
bound the damage: the disk (never more than `ArchiveLimits.disk_share` of what is free), the
compression ratio (trained weights hardly compress, text does tenfold, 200 is no model; judged per
zip member and over all, which also catches members that overlap), and the number of entries,
which costs inodes. Memory is guarded apart: both libraries read index and extended headers in one
piece, as long as the archive says, so the streams under them refuse such reads (`ShortReads`,
`HeaderGuard`).
"""

import contextlib
import errno
import gzip
import io
import math
import re
import shutil
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from marserve.frontend.errors import ArchiveRefused

_CHUNK_BYTES = 1 << 20
_TAR_BLOCK_BYTES = 64 << 10
_MAX_INDEX_BYTES = 64 << 20  # a zip's central directory: 100,000 members of 600 bytes
MAX_HEADER_BYTES = 256 << 10  # all that may stand between the data of two tar members
_MAX_NAME_BYTES = 1024
_MAX_COMPONENT_BYTES = 255  # NAME_MAX of every file system in use
_MAX_DEPTH = 64
_FIRST_WORDS = re.compile(r"[A-Za-z ,.]*(CRC-32|CRC)?[A-Za-z ,.]*")
_DRIVE = re.compile(r"[A-Za-z]:")

# What the two libraries raise at bytes that are no archive. ValueError covers names that are no
# UTF-8 and offsets below zero.
_UNREADABLE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    zlib.error,
    struct.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OverflowError,
    RecursionError,
    ValueError,
)


@dataclass(frozen=True)
class ArchiveLimits:
    """How much an archive may cost; generous, but finite."""

    max_bytes: int | None = None  # of a download, and of what it unpacks to; None: as the disk has
    disk_share: float = 0.9  # of the free disk space, for one archive, whatever max_bytes
    max_entries: int = 100_000  # files and directories together
    max_ratio: int = 200  # unpacked bytes per packed byte
    ratio_floor_bytes: int = 256 << 20  # up to this size the ratio does not matter
    download_seconds: float = 6 * 3600.0  # a whole download
    stall_seconds: float = 60.0  # connecting, and each wait for more bytes
    on_progress: Callable[[], object] = lambda: None  # called between two chunks, and for each file

    def as_json(self) -> dict[str, float | None]:
        """The limits for another process, which has its own ``on_progress``."""
        return {name: value for name, value in vars(self).items() if name != "on_progress"}

    def room_in(self, directory: Path) -> int:
        """How many bytes one archive may occupy on the disk of an existing directory."""
        room = int(shutil.disk_usage(directory).free * self.disk_share)
        return room if self.max_bytes is None else min(room, self.max_bytes)


def unpack(archive: Path, target: Path, limits: ArchiveLimits, zip_suffix: str = ".mar") -> None:
    """Unpack an archive file into a directory that does not exist yet; blocks.

    On any failure, an interrupt included, ``target`` is gone again. A file whose name ends in
    ``zip_suffix`` is a zip.

    Raises:
        ArchiveRefused: The archive is unreadable, unsafe, encrypted or beyond the limits.
        OSError: The disk failed, not the archive.
    """
    target.mkdir(mode=0o700, parents=True)
    try:
        is_zip = archive.suffix == zip_suffix
        with _refuse_unreadable(archive.name, is_zip=is_zip):
            unpack_format = _unpack_zip if is_zip else _unpack_tar
            unpack_format(archive, _Target(target, archive.stat().st_size, limits))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


@contextlib.contextmanager
def _refuse_unreadable(name: str, *, is_zip: bool) -> Iterator[None]:
    kind = "zip archive" if is_zip else "gzip-compressed tar archive"
    try:
        yield
    except (*_UNREADABLE, OSError) as error:
        # BadGzipFile is an OSError without a number; EINVAL comes from offsets that lie.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ArchiveRefused(f"{name} is not a readable {kind}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """The first words of an error: others may quote the file, which need be no archive at all."""
    text = str(error)
    if isinstance(error, zlib.error):
        return text  # its words are all its own
    words = _FIRST_WORDS.match(text)
    return (words[0].strip() if words else "") or type(error).__name__


def _printable(text: str) -> str:
    return (text if text.isprintable() else ascii(text))[:200]


class _Target:
    """The directory that is unpacked into, empty and private, and what may still go there."""

    def __init__(self, root: Path, packed_bytes: int, limits: ArchiveLimits) -> None:
        self._limits = limits
        self._folders = {root}
        self._root = root
        self._entries = 0
        self._bytes = 0
        self._room = limits.room_in(root)
        self._max_bytes = self._ratio_cap(packed_bytes)

    def add_folder(self, parts: tuple[str, ...]) -> None:
        """Create a directory and those above it; one that exists is left alone."""
        with _refuse_duplicates(parts):
            self._make(self._root.joinpath(*parts))

    def add_file(
        self, parts: tuple[str, ...], source: IO[bytes], packed_bytes: int | None = None
    ) -> int:
        """Write a new file of ``packed_bytes`` (where known) in the archive; the bytes it got."""
        if not parts:
            raise ArchiveRefused("Archive holds a file without a name.")
        path = self._root.joinpath(*parts)
        max_bytes = math.inf if packed_bytes is None else self._ratio_cap(packed_bytes)
        with _refuse_duplicates(parts):
            self._make(path.parent)
            self._count_entry()
            file = path.open("xb")
        with file:
            return self._copy(source, file, max_bytes)

    def _copy(self, source: IO[bytes], file: IO[bytes], max_bytes: float) -> int:
        written = 0
        while chunk := source.read(_CHUNK_BYTES):
            self._limits.on_progress()
            written += len(chunk)
            self._bytes += len(chunk)
            if self._bytes > self._room:
                raise ArchiveRefused(
                    f"Archive needs more than the {self._room} bytes it may unpack to."
                )
            if self._bytes > self._max_bytes or written > max_bytes:
                raise ArchiveRefused(
                    f"Archive unpacks to more than {self._limits.max_ratio} times its size; "
                    "that is a decompression bomb, not a model."
                )
            file.write(chunk)
        return written

    def _make(self, folder: Path) -> None:
        if folder in self._folders:
            return
        self._make(folder.parent)
        self._count_entry()
        folder.mkdir()
        self._folders.add(folder)

    def _count_entry(self) -> None:
        self._limits.on_progress()
        self._entries += 1
        if self._entries > self._limits.max_entries:
            raise ArchiveRefused(
                f"Archive holds more than {self._limits.max_entries} files and directories."
            )

    def _ratio_cap(self, packed_bytes: int) -> int:
        return max(self._limits.ratio_floor_bytes, packed_bytes * self._limits.max_ratio)


@contextlib.contextmanager
def _refuse_duplicates(parts: tuple[str, ...]) -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        member = _printable("/".join(parts))
        raise ArchiveRefused(f"Archive holds more than one member named {member}") from error


def member_parts(name: str) -> tuple[str, ...]:
    """The components of a member's name.

    Raises:
        ArchiveRefused: It would not stay below a directory, or no file can have it.
    """
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if name.startswith("/") or ".." in parts or _DRIVE.match(name):
        raise ArchiveRefused(f"Detected Zip Slip vulnerability: {_printable(name)}")
    if "\\" in name or "\0" in name:
        raise ArchiveRefused(f"Archive member has an invalid name: {_printable(name)}")
    sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    is_long = sum(sizes) > _MAX_NAME_BYTES or max(sizes, default=0) > _MAX_COMPONENT_BYTES
    if is_long or len(parts) > _MAX_DEPTH:
        raise ArchiveRefused(f"Archive member has too long a name: {_printable(name)}")
    return parts


# Zip ------------------------------------------------------------------------------------------


class ShortReads(io.FileIO):
    """A file that refuses to be read in one enormous piece, as zipfile reads an index."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to ``size`` bytes."""
        if size is not None and size > _MAX_INDEX_BYTES:
            raise ArchiveRefused(f"Archive has an index of more than {_MAX_INDEX_BYTES} bytes.")
        return super().read(size) or b""


def _unpack_zip(path: Path, target: _Target) -> None:
    with ShortReads(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            # orig_filename: the library's own `filename` is already cut off at a NUL.
            parts = member_parts(member.orig_filename)
            check_zip_member(member)
            if member.is_dir():
                target.add_folder(parts)
                continue
            with archive.open(member) as source:
                written = target.add_file(parts, source, member.compress_size)
            if written != member.file_size:
                raise ArchiveRefused(f"Archive member is cut short: {_printable(member.filename)}")


def check_zip_member(member: zipfile.ZipInfo) -> None:
    """Raise ArchiveRefused for a member that is no plain file, or packed in an unsafe way."""
    name = _printable(member.filename)
    if member.flag_bits & 0x41:
        raise ArchiveRefused(f"Archive member is encrypted: {name}")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ArchiveRefused(f"Archive member is compressed in an unsupported way: {name}")
    kind = stat.S_IFMT(member.external_attr >> 16)
    if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
        raise ArchiveRefused(f"Archive member is a link or a device: {name}")


# Tar ------------------------------------------------------------------------------------------


class HeaderGuard(gzip.GzipFile):
    """The stream under a tar reader; between two members it runs dry before memory does."""

    left: float = MAX_HEADER_BYTES  # bytes that may be read before the guard objects

    def read(self, size: int | None = -1) -> bytes:
        """Up to ``size`` decompressed bytes."""
        data = super().read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ArchiveRefused(f"Archive has a header of more than {MAX_HEADER_BYTES} bytes.")
        return data


def _unpack_tar(path: Path, target: _Target) -> None:
    with (
        HeaderGuard(path) as guard,
        tarfile.open(fileobj=guard, mode="r|", bufsize=_TAR_BLOCK_BYTES) as archive,
    ):
        for member in archive:
            guard.left = math.inf
            _unpack_tar_member(archive, member, target)
            guard.left = MAX_HEADER_BYTES
        _check_tar_end(archive)


def _unpack_tar_member(archive: tarfile.TarFile, member: tarfile.TarInfo, target: _Target) -> None:
    parts = member_parts(_without_first_component(member.name))
    if member.isdir() and "/" not in member.name:
        return  # the folder around everything: its name is cut off everywhere
    if member.isdir():
        target.add_folder(parts)
    elif member.isreg() and not member.issparse():
        source = archive.extractfile(member)
        assert source is not None  # only links and devices have no data
        with source:
            target.add_file(parts, source)
    else:
        raise ArchiveRefused(
            f"Archive member is a link, a device or a sparse file: {_printable(member.name)}"
        )


def _without_first_component(name: str) -> str:
    """What follows the first slash, once the name is known to be harmless."""
    member_parts(name)
    return name.partition("/")[2].lstrip("/") if "/" in name else name


def _check_tar_end(archive: tarfile.TarFile) -> None:
    """Read on to the end, which makes gzip compare its checksum.

    tarfile takes a broken header for the end of the archive; then what follows is not zeros.
    """
    assert archive.fileobj is not None
    while trailer := archive.fileobj.read(_TAR_BLOCK_BYTES):
        if trailer.strip(b"\0"):
            raise ArchiveRefused("Archive has data behind its end, or a broken header within.")
