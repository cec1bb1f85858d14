"""``url`` of a registration → a model directory of its own.

Three kinds of URL, tried in this order: one with a scheme is downloaded into the model store
(``download.py``); a file in the store is unpacked (``unpack.py``); a directory, given as a path or
lying in the store, is linked, so that changes to a handler are seen by the next worker.

TorchServe looked up ``/any/where/x.mar`` as ``x.mar`` in its store, whatever lay at the path. Here
a path to a file counts only when it leads into the store: nobody gets another file than he named.

Every directory handed out is ``<workdir>/models/<32 hex>`` or lies in it, and `Archive.remove`
deletes just that. A failure leaves nothing behind: no directory, no download.
"""

import os
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from marserve.frontend.errors import ModelNotFound
from marserve.frontend.models.download import Source, check_allowed, download
from marserve.frontend.models.unpack import ArchiveLimits, unpack

__all__ = ["Archive", "ArchiveLimits", "open_archive"]

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_FETCHED_SCHEMES = ("http", "https", "file", "s3")
_DEFAULT_LIMITS = ArchiveLimits()


@dataclass(frozen=True)
class Archive:
    """A model's files, ready for a worker.

    Attributes:
        url: As it was given.
        directory: Where the model lives; for a plain directory a link to it.
        file_name: Base name of the archive file or directory.
        root: What exists for this archive alone, and goes with it.
        downloaded: The file that a download put into the model store.
    """

    url: str
    directory: Path
    file_name: str
    root: Path
    downloaded: Path | None = None

    @property
    def implied_model_name(self) -> str:
        """The name of a model whose manifest has none; see `implied_model_name`."""
        return implied_model_name(self.file_name)

    def remove(self) -> None:
        """Deletes what was unpacked, linked or downloaded, never the user's own; repeatable."""
        if self.root.exists():
            shutil.rmtree(self.root)
        if self.downloaded is not None:
            self.downloaded.unlink(missing_ok=True)


def implied_model_name(url: str) -> str:
    """The name of a file or directory without extension, word characters only."""
    return re.sub(r"\W", "_", Path(url).stem, flags=re.ASCII)


def open_archive(
    url: str,
    *,
    model_store: Path | None,
    allowed_urls: Sequence[re.Pattern[str]],
    workdir: Path,
    limits: ArchiveLimits = _DEFAULT_LIMITS,
    s3_sse_kms: bool = False,
) -> Archive:
    """Finds or fetches an archive and unpacks it; blocks, for minutes where models are large.

    Args:
        url: Name in the store, directory path, or ``http(s)://``, ``s3://`` or ``file://`` URL.
        model_store: Where archives lie.
        allowed_urls: Patterns, one of which must match a URL as a whole, in any case of letters.
        workdir: The server's own temporary directory.
        limits: How much an archive may cost.
        s3_sse_kms: Whether an http(s) URL leads to S3 and is to be asked with AWS credentials.

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
        _check_scheme(url, scheme[1])
        check_allowed(url, allowed_urls)
        return _open_remote(Source(url, allowed_urls, limits, s3_sse_kms), store, root)
    source = _find(url, store)
    if source.is_dir():
        return _link(url, source, root)
    unpack(source, root, limits)
    return Archive(url=url, directory=root, file_name=source.name, root=root)


def _checked_store(url: str, model_store: Path | None) -> Path:
    if not url:
        raise ModelNotFound("empty url")
    if ".." in unquote(url):  # unquoted: a file URL may spell its dots as %2e
        raise ModelNotFound(f"Relative path is not allowed in url: {url}")
    if model_store is None:
        raise ModelNotFound("Model store has not been configured.")
    return model_store


def _check_scheme(url: str, scheme: str) -> None:
    if scheme.lower() not in _FETCHED_SCHEMES:
        raise ModelNotFound(f"Model not found at: {url}")


def _open_remote(source: Source, store: Path, root: Path) -> Archive:
    fetched = download(source, store)
    try:
        unpack(fetched, root, source.limits)
    except BaseException:
        fetched.unlink(missing_ok=True)
        raise
    return Archive(
        url=source.url, directory=root, file_name=fetched.name, root=root, downloaded=fetched
    )


def _find(url: str, store: Path) -> Path:
    """The file or directory that a URL without scheme means."""
    in_store, at_path = _absolute(store / url), _absolute(Path(url))
    try:
        for path in (in_store, at_path):
            if path.is_relative_to(_absolute(store)) and path.is_file():
                return path
        for path in (at_path, in_store):
            if path.is_dir():
                return path
    except (OSError, ValueError) as error:  # a name too long, or one that is no path at all
        raise ModelNotFound(f"Model not found at: {url}") from error
    raise ModelNotFound(f"Model not found at: {url}")


def _absolute(path: Path) -> Path:
    """Absolute and normalised by its text: a link in the store stays a path in the store."""
    return Path(os.path.abspath(path))  # noqa: PTH100 # resolve() would follow the owner's links


def _link(url: str, source: Path, root: Path) -> Archive:
    model = _model_in(source)
    link = root / (model.name or "model")  # the root directory has no name
    root.mkdir(mode=0o700, parents=True)
    try:
        link.symlink_to(model, target_is_directory=True)
    except BaseException:
        shutil.rmtree(root, ignore_errors=True)
        raise
    return Archive(url=url, directory=link, file_name=source.name, root=root)


def _model_in(directory: Path) -> Path:
    """The directory itself, or its only entry where that is one (the layout of SageMaker)."""
    entries = list(directory.iterdir())
    if len(entries) == 1 and entries[0].is_dir() and entries[0].name != "MAR-INF":
        return entries[0]
    return directory
