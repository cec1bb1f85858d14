"""A digest of everything that determines the content of an installation."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tar.bz2", ".tar.xz")


def requirements_digest(
    directory: Path, file: str, settings: str, on_progress: Callable[[], object] = lambda: None
) -> str:
    """Return 32 characters for a requirements file (may be empty) and further settings; blocks."""
    digest = hashlib.sha256(settings.encode())
    if file:
        seen: set[Path] = set()
        for path in _files_behind(directory / file, directory, seen):
            digest.update(os.fsencode(_name(path, directory)))
            digest.update(_fingerprint(path, directory, on_progress))
    return digest.hexdigest()[:32]


def _files_behind(requirements: Path, directory: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield a requirements file and every local file that its words name, recursively."""
    yield requirements
    seen.add(requirements)
    for word in _words(requirements):
        for base in (directory, requirements.parent):  # pip's two ways of being relative
            path = base / word
            if path in seen or not os.path.exists(path):  # noqa: PTH110 - Path.exists raises for long words
                continue
            seen.add(path)
            if path.is_dir():
                yield from _files_in(path)
            elif path.is_fifo():  # opening it would block
                raise OSError(f"{word} is a pipe")
            elif path.suffix in (".txt", ".in"):
                yield from _files_behind(path, directory, seen)
            else:
                yield path


def _words(requirements: Path) -> Iterator[str]:
    text = requirements.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        for word in re.split(r"[\s=@\[\];]+", re.sub(r"(^|\s)#.*", "", line)):
            if word:
                yield word.removeprefix("file://").removeprefix("-r").removeprefix("-c")


def _files_in(directory: Path) -> Iterator[Path]:
    """Yield the files that pip would read: all of a source tree, else the archives in it."""
    is_source = any((directory / name).exists() for name in ("pyproject.toml", "setup.py"))
    paths = directory.rglob("*") if is_source else directory.iterdir()
    for path in sorted(paths):
        if path.is_file() and (is_source or path.name.endswith(_ARCHIVES)):
            yield path


def _name(path: Path, directory: Path) -> Path:
    """Return a path relative to the model's directory, which differs for each registration."""
    return path.relative_to(directory) if path.is_relative_to(directory) else path


def _fingerprint(path: Path, directory: Path, on_progress: Callable[[], object]) -> bytes:
    """Return a digest of a file of the model; of others, such as a mirror's, size and time."""
    on_progress()
    if path.resolve().is_relative_to(directory.resolve()):
        content = hashlib.sha256()
        with path.open("rb") as file:
            while piece := file.read(1 << 20):  # a package's folder may contain weights
                content.update(piece)
                on_progress()
        return content.digest()
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}".encode()
