"""Unpack an untrusted archive into a directory, or refuse it and leave nothing behind.

Its first bytes say whether it is a zip or a gzipped tar; of the members of a tar the first path
component is removed. Threats and measures:

* Writing outside the directory: only regular files and directories are created, in a new private
  directory, and every file is opened with ``x``, so that no link is ever followed. Of two members
  with one name, or with names that are equal for the file system, the second is refused. Names are
  checked as the archive contains them, before a component is removed or the name normalised.
* Wrong headers: bytes are counted as they are written; declared sizes are not used.
* Bombs: models may be tens of gigabytes, so a fixed size limit would be wrong. Three limits apply:
  a share of the free disk space; the compression ratio, per zip member and in total, which also
  covers overlapping members (weights hardly compress, text tenfold, 200 is no model); and the
  number of entries, which cost inodes.
* Memory: both libraries read an index or extended header in one piece of the size that the archive
  declares, so the streams below them refuse such reads (`ShortReads`, `HeaderGuard`).
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
from marserve.frontend.regular_files import open_file

_ZIP, _GZIP = b"PK\x03\x04", b"\x1f\x8b"  # their first bytes
_ZIP_SUFFIXES = (".mar", ".war")
_CHUNK_BYTES = 1 << 20
_TAR_BLOCK_BYTES = 64 << 10
_MAX_INDEX_BYTES = 64 << 20  # a zip's central directory: 100,000 members of 600 bytes
MAX_HEADER_BYTES = 256 << 10  # between the data of two tar members
_MAX_NAME_BYTES = 1024
_MAX_COMPONENT_BYTES = 255  # NAME_MAX of every file system in use
_MAX_DEPTH = 64
_FIRST_WORDS = re.compile(r"[A-Za-z ,.]*(CRC-32|CRC)?[A-Za-z ,.]*")
_DRIVE = re.compile(r"[A-Za-z]:")

# What the two libraries raise for invalid archives; ValueError for invalid UTF-8 and offsets.
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
    """The limits of one archive."""

    max_bytes: int | None = None  # of a download, and of the unpacked files
    disk_share: float = 0.9  # of the free disk space
    max_entries: int = 100_000  # files and directories
    max_ratio: int = 200  # unpacked bytes per packed byte
    ratio_floor_bytes: int = 256 << 20  # up to this size the ratio is not checked
    download_seconds: float = 6 * 3600.0  # of a whole download
    stall_seconds: float = 60.0  # of connecting, and of each wait for more bytes
    on_progress: Callable[[], object] = lambda: None  # called for each chunk and file

    def as_json(self) -> dict[str, float | None]:
        """Return the limits for another process, without ``on_progress``."""
        return {name: value for name, value in vars(self).items() if name != "on_progress"}

    def room_in(self, directory: Path) -> int:
        """Return the bytes that one archive may occupy on the disk of an existing directory."""
        room = int(shutil.disk_usage(directory).free * self.disk_share)
        return room if self.max_bytes is None else min(room, self.max_bytes)


def unpack(archive: Path, target: Path, limits: ArchiveLimits) -> None:
    """Unpack an archive file into a new directory, which a failure removes again; blocks.

    Raises:
        ArchiveRefused: The archive is unreadable, unsafe, encrypted or beyond the limits.
        OSError: The disk failed.
    """
    target.mkdir(mode=0o700, parents=True)
    try:
        as_zip = is_zip(archive)
        with _refuse_unreadable(archive.name, is_zip=as_zip):
            unpack_format = _unpack_zip if as_zip else _unpack_tar
            unpack_format(archive, _Target(target, archive.stat().st_size, limits))
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def is_zip(archive: Path) -> bool:
    """Whether to read a file as a zip: by its first bytes, or by its name for damaged ones."""
    with open_file(archive) as file:
        first = file.read(len(_ZIP))
    return first == _ZIP or (not first.startswith(_GZIP) and archive.suffix in _ZIP_SUFFIXES)


@contextlib.contextmanager
def _refuse_unreadable(name: str, *, is_zip: bool) -> Iterator[None]:
    kind = "zip archive" if is_zip else "gzip-compressed tar archive"
    try:
        yield
    except (*_UNREADABLE, OSError) as error:
        # BadGzipFile is an OSError without a number; wrong offsets raise EINVAL.
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise
        raise ArchiveRefused(f"{name} is not a readable {kind}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """Return the first words of an error: the rest may quote a file that is no archive."""
    text = str(error)
    if isinstance(error, zlib.error):
        return text  # it quotes nothing
    words = _FIRST_WORDS.match(text)
    return (words[0].strip() if words else "") or type(error).__name__


def _printable(text: str) -> str:
    return (text if text.isprintable() else ascii(text))[:200]


class _Target:
    """The private directory that an archive is unpacked into, with its limits."""

    def __init__(self, root: Path, packed_bytes: int, limits: ArchiveLimits) -> None:
        self._limits = limits
        self._folders = {root}
        self._root = root
        self._entries = 0
        self._bytes = 0
        self._room = limits.room_in(root)
        self._max_bytes = self._ratio_cap(packed_bytes)

    def add_folder(self, parts: tuple[str, ...]) -> None:
        with _refuse_duplicates(parts):
            self._make(self._root.joinpath(*parts))

    def add_file(
        self, parts: tuple[str, ...], source: IO[bytes], packed_bytes: int | None = None
    ) -> int:
        """Write a file, of ``packed_bytes`` in the archive if known; return its size."""
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
    """Return the components of a member's name; raises ArchiveRefused for one that is not safe."""
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
    """A file that refuses long reads: zipfile reads the index of an archive in one piece."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return up to ``size`` bytes."""
        if size is not None and size > _MAX_INDEX_BYTES:
            raise ArchiveRefused(f"Archive has an index of more than {_MAX_INDEX_BYTES} bytes.")
        return super().read(size) or b""


def _unpack_zip(path: Path, target: _Target) -> None:
    with ShortReads(path) as file, zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            # zipfile cuts off `filename` at a NUL.
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
    """Raise ArchiveRefused for a link or device, or an unsupported compression."""
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
    """The stream of a tar reader, which limits the bytes between two members."""

    left: float = MAX_HEADER_BYTES  # bytes that may still be read

    def read(self, size: int | None = -1) -> bytes:
        """Return up to ``size`` decompressed bytes."""
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
        return  # the folder around all members
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
    """Return what follows the first slash of a valid name."""
    member_parts(name)
    return name.partition("/")[2].lstrip("/") if "/" in name else name


def _check_tar_end(archive: tarfile.TarFile) -> None:
    """Read to the end, where gzip compares its checksum.

    tarfile takes an invalid header for the end of the archive; then the rest is not zeros.
    """
    assert archive.fileobj is not None
    while trailer := archive.fileobj.read(_TAR_BLOCK_BYTES):
        if trailer.strip(b"\0"):
            raise ArchiveRefused("Archive has data behind its end, or a broken header within.")
