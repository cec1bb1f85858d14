"""Find, link and copy archives and model directories of this machine; all functions block."""

import logging
import os
from pathlib import Path

from marserve.backend.manifest import MANIFEST_PATH
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.errors import DownloadFailed, ModelNotFound, WorkflowNotFound
from marserve.frontend.logs.formats import one_line
from marserve.frontend.regular_files import open_file

logger = logging.getLogger(__name__)


def find_model(url: str, store: Path) -> Path:
    """Return the file or directory that a URL without scheme means."""
    in_store, at_path = _absolute(store / url), _absolute(Path(url))
    by_name = _absolute(store / Path(url).name)
    places, inner = (in_store, at_path, by_name), _absolute(store)
    inside = [place for place in places if place.is_relative_to(inner)]
    try:
        found = next(filter(Path.is_file, inside), None) or next(
            filter(Path.is_dir, (at_path, in_store, by_name)), None
        )
    except (OSError, ValueError):  # too long, or a null byte
        found = None
    if found is None:
        raise ModelNotFound(f"Model not found at: {url}")
    if found not in (in_store, at_path):
        logger.info("%s is taken from the model store, as %s.", one_line(url), found.name)
    return found


def find_workflow(url: str, store: Path) -> Path:
    """Return the file in the store whose name is the last part of a URL without scheme."""
    path = store / Path(url).name
    try:
        is_there, is_file = path.exists(), path.is_file()
    except (OSError, ValueError):  # too long, or a null byte
        is_there = is_file = False
    if not is_there:
        raise WorkflowNotFound(f"Workflow not found in workflow store: {url}")
    if not is_file:
        raise WorkflowNotFound(f"Workflow not found at: {url}")
    return path


def link_directory(source: Path, root: Path) -> Path:
    """Make ``root`` with a link to the model in a directory; return the link."""
    model = _model_in(source)
    link = root / (model.name or "model")  # the root directory has no name
    root.mkdir(mode=0o700, parents=True)
    try:
        link.symlink_to(model, target_is_directory=True)
    except OSError:
        root.rmdir()
        raise
    return link


def has_manifest(directory: Path) -> bool:
    """Whether the directory contains a model with a manifest."""
    try:
        return (_model_in(directory) / MANIFEST_PATH).is_file()
    except OSError:  # no permission
        return False


def copy_file(source: Path, target: Path, limits: ArchiveLimits) -> None:
    """Copy a file to a new one.

    Raises:
        DownloadFailed: The source cannot be read, or is too large; the text is the reason.
    """
    room, copied = limits.room_in(target.parent), 0
    try:
        file = open_file(source)
    except OSError as error:
        raise DownloadFailed(str(error.strerror)) from error
    with file, target.open("xb") as copy:
        while piece := file.read(1 << 20):
            copied += len(piece)
            if copied > room:
                raise DownloadFailed(f"it is larger than the {room} bytes it may have")
            copy.write(piece)
            limits.on_progress()


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links in the store


def _model_in(directory: Path) -> Path:
    """Return the directory, or its only entry if that is a directory (SageMaker's layout)."""
    entries = list(directory.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and entries[0].name != "MAR-INF":
        return entries[0]
    return directory
