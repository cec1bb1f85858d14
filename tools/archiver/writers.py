"""Write archives: zip files, tar files, plain directories."""

import contextlib
import functools
import io
import shutil
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Bound here, because tests of other projects replace the class in its module.
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile, ZipInfo


@dataclass(frozen=True)
class Content:
    """The content of an archive, in order: the manifest, then the members."""

    name: str  # of the model or the workflow
    manifest_path: str
    manifest: str
    members: list[tuple[str, Path]]


@contextlib.contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces the target at the end, or is removed on failure."""
    part = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        yield part
        if target.is_dir() and part.is_dir():
            _move_files(part, target)
        else:
            part.replace(target)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def _move_files(source: Path, target: Path) -> None:
    """Move every file into an existing directory, whose other files stay."""
    for path in source.rglob("*"):
        if path.is_file():
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)


def _write_zip(part: Path, content: Content, compression: int) -> None:
    with ZipFile(part, "x", compression, strict_timestamps=False) as archive:
        info = ZipInfo(content.manifest_path, time.localtime()[:6])
        info.external_attr = 0o644 << 16
        archive.writestr(info, content.manifest, compression)
        for name, source in content.members:
            archive.write(source, name)


def _write_tgz(part: Path, content: Content) -> None:
    data = content.manifest.encode()
    with tarfile.open(part, "x:gz") as archive:
        info = _tar_info(content, content.manifest_path, len(data), time.time())
        archive.addfile(info, io.BytesIO(data))
        for name, source in content.members:
            state = source.stat()
            with source.open("rb") as file:
                archive.addfile(_tar_info(content, name, state.st_size, state.st_mtime), file)


def _tar_info(content: Content, name: str, size: int, modified: float) -> tarfile.TarInfo:
    """Return a regular file without owner; tarfile would write hard links of files."""
    info = tarfile.TarInfo(f"{content.name}/{name}")
    info.size, info.mtime = size, int(modified)
    return info


def _write_directory(part: Path, content: Content) -> None:
    manifest = part / content.manifest_path
    manifest.parent.mkdir(parents=True)
    manifest.write_text(content.manifest, encoding="utf-8")
    for name, source in content.members:
        place = part / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, place)


WRITERS: dict[str, Callable[[Path, Content], None]] = {
    "default": functools.partial(_write_zip, compression=ZIP_DEFLATED),
    "zip-store": functools.partial(_write_zip, compression=ZIP_STORED),
    "tgz": _write_tgz,
    "no-archive": _write_directory,
}
