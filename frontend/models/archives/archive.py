"""``url`` of a registration → a model directory of its own.

Three kinds of URL, tried in this order: one with a scheme is downloaded into the model store
(``download.py``); a file in the store is unpacked (``unpack.py``); a directory, given as a path or
lying in the store, is linked, so that changes to a handler are seen by the next worker.

A path to a file counts where it leads into the store. Of any other the last part is looked up in
the store, whatever lies at the path, as in TorchServe: clients such as mlflow-torchserve name the
file they have packed by its own path. Nothing outside the store is read, and it is logged.

Every directory handed out is ``<workdir>/models/<32 hex>`` or lies in it, and `Archive.remove`
deletes just that. A failure leaves nothing behind: no directory, no download.
"""

import asyncio
import logging
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from marserve.backend.manifest import MANIFEST_PATH
from marserve.frontend.background import to_thread_and_back
from marserve.frontend.errors import ModelNotFound
from marserve.frontend.logs.formats import one_line
from marserve.frontend.models.archives.download import Source, check_allowed, download
from marserve.frontend.models.archives.unpack import ArchiveLimits, unpack

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_FETCHED_SCHEMES = ("http", "https", "file", "s3")
_DEFAULT_LIMITS = ArchiveLimits()


@dataclass(frozen=True)
class Archive:
    """A model's files, ready for a worker."""

    url: str  # as it was given
    directory: Path  # where the model lives; for a plain directory a link to it
    root: Path  # what exists for this archive alone, and goes with it
    source: Path  # the file or directory that it was made of
    is_downloaded: bool = False  # then the source was put into the model store

    def remove(self) -> None:
        """Delete what was unpacked, linked or downloaded, never the user's own; repeatable."""
        if self.root.exists():
            shutil.rmtree(self.root)
        if self.is_downloaded:
            self.source.unlink(missing_ok=True)


def implied_model_name(url: str) -> str:
    """The name of a model whose manifest has none: the file's, word characters only."""
    return re.sub(r"\W", "_", Path(url).stem, flags=re.ASCII)


def has_manifest(directory: Path) -> bool:
    """Whether there is a manifest where it is looked for when the directory is a model."""
    try:
        return (_model_in(directory) / MANIFEST_PATH).is_file()
    except OSError:  # it is not for us to read
        return False


async def open_archive(
    url: str,
    *,
    model_store: Path | None,
    allowed_urls: Sequence[re.Pattern[str]],
    workdir: Path,
    limits: ArchiveLimits = _DEFAULT_LIMITS,
    s3_sse_kms: bool = False,
) -> Archive:
    """Find or fetch an archive and unpack it; takes minutes where models are large.

    ``url`` is a name in the store, a directory's path or a URL, which one of ``allowed_urls`` must
    match as a whole, in any case of letters. With ``s3_sse_kms`` an http(s) URL leads to S3 and is
    asked with AWS credentials. Cancelled, it leaves nothing behind, as after a failure; a thread
    that unpacks is waited for, which ``limits`` should have end.

    Raises:
        ModelNotFound: There is no such archive, or it must not be asked for.
        ModelFileExists: A download would replace a file in the store.
        DownloadFailed: A download did not come through.
        ArchiveRefused: The archive is unreadable or unsafe.
    """
    store = _checked_store(url, model_store)
    root = workdir / "models" / uuid.uuid4().hex
    scheme = _SCHEME.match(url)
    if scheme:
        if scheme[1].lower() not in _FETCHED_SCHEMES:
            raise ModelNotFound(f"Model not found at: {url}")
        check_allowed(url, allowed_urls)
        source = await download(Source(url, allowed_urls, limits, s3_sse_kms), store)
        return await _unpack(Archive(url, root, root, source, is_downloaded=True), limits)
    source = await asyncio.to_thread(_find, url, store)
    if source.is_dir():
        return await asyncio.to_thread(_link, url, source, root)
    return await _unpack(Archive(url, root, root, source), limits)


def _checked_store(url: str, model_store: Path | None) -> Path:
    if not url:
        raise ModelNotFound("empty url")
    if ".." in unquote(url):  # unquoted: a file URL may spell its dots as %2e
        raise ModelNotFound(f"Relative path is not allowed in url: {url}")
    if model_store is None:
        raise ModelNotFound("Model store has not been configured.")
    return model_store


async def _unpack(archive: Archive, limits: ArchiveLimits) -> Archive:
    try:
        await to_thread_and_back(unpack, archive.source, archive.root, limits)
    except BaseException:
        archive.remove()
        raise
    return archive


def _find(url: str, store: Path) -> Path:
    """The file or directory that a URL without scheme means."""
    in_store, at_path = _absolute(store / url), _absolute(Path(url))
    by_name = _absolute(store / Path(url).name)
    places, inner = (in_store, at_path, by_name), _absolute(store)
    inside = [place for place in places if place.is_relative_to(inner)]
    try:
        found = next(filter(Path.is_file, inside), None) or next(
            filter(Path.is_dir, (at_path, in_store, by_name)), None
        )
    except (OSError, ValueError):  # a name too long, or one that is no path at all
        found = None
    if found is None:
        raise ModelNotFound(f"Model not found at: {url}")
    if found not in (in_store, at_path):
        logger.info("%s is taken from the model store, as %s.", one_line(url), found.name)
    return found


def _absolute(path: Path) -> Path:
    """Absolute and normalised by its text: a link in the store stays a path in the store."""
    return Path(os.path.abspath(path))  # noqa: PTH100 # resolve() would follow the owner's links


def _link(url: str, source: Path, root: Path) -> Archive:
    model = _model_in(source)
    link = root / (model.name or "model")  # the root directory has no name
    root.mkdir(mode=0o700, parents=True)
    try:
        link.symlink_to(model, target_is_directory=True)
    except OSError:
        root.rmdir()
        raise
    return Archive(url, link, root, source)


def _model_in(directory: Path) -> Path:
    """The directory itself, or its only entry where that is one (the layout of SageMaker)."""
    entries = list(directory.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and entries[0].name != "MAR-INF":
        return entries[0]
    return directory
