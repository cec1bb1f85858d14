"""The members of an archive: their names and source files."""

import glob
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_WILDCARD = re.compile(r"[*?[]")
_LEFT_OUT_FOLDERS = ("__pycache__", "__MACOSX")


class ModelArchiverError(Exception):
    """An archive that cannot be written; the message contains what to change."""


class Members:
    """Names in the archive and their source files, without the manifest."""

    def __init__(self, manifest_path: str) -> None:
        self._manifest_path = manifest_path
        self._sources: dict[str, Path] = {}

    def add(self, name: str, source: Path) -> None:
        """Add a file; it replaces an earlier one of the same name."""
        if not source.is_file():
            raise FileNotFoundError(f"File does not exist: {source}")
        rival = self._sources.get(name)
        if rival is not None and not rival.samefile(source):
            logger.warning(
                "%s replaces %s: both are called %s in the archive.", source, rival, name
            )
        self._sources[name] = source

    def finished(self) -> list[tuple[str, Path]]:
        """Return all files sorted by name, without one at the manifest's path."""
        manifest = self._manifest_path
        if self._sources.pop(manifest, None) is not None:
            logger.warning("The %s among the extra files is replaced by a new one.", manifest)
        for name in self._sources:
            for folder in Path(name).parents:
                if folder.as_posix() in self._sources:
                    raise ModelArchiverError(
                        f"{self._sources[folder.as_posix()]} and the directory of "
                        f"{self._sources[name]} are both called {folder} in the archive."
                    )
        return sorted(self._sources.items())


def extra_entries(extra_files: str) -> Iterator[Path]:
    """Expand a comma-separated list to files and directories."""
    for entry in filter(None, map(str.strip, extra_files.split(","))):
        if Path(entry).exists() or not _WILDCARD.search(entry):
            yield Path(entry)
            continue
        found = sorted(glob.glob(entry))  # noqa: PTH207 # Path.glob takes no absolute patterns
        if not found:
            logger.warning("No file matches the wildcard %s.", entry)
        yield from map(Path, found)


def add_extra(members: Members, entry: Path, *, keep_tree: bool) -> None:
    """Add a file or the contents of a directory; with ``keep_tree`` it keeps its directories."""
    prefix = _kept_path(entry) if keep_tree else Path()
    if entry.is_dir():
        for path in _files_in(entry, frozenset()):
            members.add((prefix / path.relative_to(entry)).as_posix(), path)
    else:
        members.add(prefix.as_posix() if keep_tree else entry.name, entry)


def _kept_path(entry: Path) -> Path:
    """Return the path relative to the current directory; outside of it, the base name."""
    here, path = Path.cwd(), Path(os.path.abspath(entry))  # noqa: PTH100 # links are not resolved
    return path.relative_to(here) if path.is_relative_to(here) else Path(path.name)


def _files_in(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Return all files of a directory tree; links are followed, except in a cycle."""
    if folder.resolve() in above:
        raise ModelArchiverError(f"{folder} is a link to a directory that contains it.")
    for path in folder.iterdir():
        if not path.is_dir():
            yield path
        elif not path.name.startswith(".") and path.name not in _LEFT_OUT_FOLDERS:
            yield from _files_in(path, above | {folder.resolve()})
