"""Open the archive at the ``url`` of a registration: download, unpack and read it.

A URL with a scheme is downloaded into the model store. Otherwise a file in the store is unpacked,
or a directory is linked, so that the next worker sees changes of a handler. No file outside the
store is read: its path means the file of that name in the store, as in TorchServe, because
mlflow-torchserve sends the path of the file it has packed.

An archive is opened into ``<workdir>/models/<32 hex>`` (``workflows/`` for those), which
`Archive.remove` deletes. A failure leaves neither a directory nor a download. `Archive.restore`
unpacks files again that a cleaner of temporary files has removed.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from marserve.frontend.aio.background import DaemonThreads, Slots, in_abandonable_thread
from marserve.frontend.archives.contents import Contents, WorkflowContents
from marserve.frontend.archives.download import Downloader, check_allowed, target_of
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.unread_keys import READ_YAML_KEYS
from marserve.frontend.configuration.values import without_secrets
from marserve.frontend.errors import ModelNotFound, ServeError, ServerBusy, WorkflowNotFound
from marserve.frontend.lifecycle.workdir import make_again

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_MAX_WATCHED = 10_000  # files of an archive that are missed when something removes them
_REMOVAL_SECONDS = 10.0  # for which callers wait for a removal


async def _nothing() -> None: ...


@dataclass(frozen=True)
class Archive:
    """The files of a model, ready for a worker."""

    url: str  # of the registration
    directory: Path  # of the model; a link if the model is a directory of the user
    root: Path  # directory that exists for this archive alone
    source: Path  # file or directory that was opened
    is_downloaded: bool = False  # whether the source was made by a download
    contents: Contents = field(default_factory=Contents)  # of a model; empty for a workflow
    files: Sequence[str] = ()  # all or the first ones, relative to the root; directories first
    version: tuple[int, ...] = ()  # of the source (`_version_of`); empty if it was not kept
    #: Unpacks missing files again, for a worker that is about to start; raises OSError.
    restore: Callable[[], Awaitable[None]] = field(default=_nothing, compare=False)

    def missing(self) -> str:
        """Return the first file that is gone; empty if none is."""
        gone = (name for name in self.files if not os.path.lexists(self.root / name))
        return next(gone, "")

    def remove(self) -> None:
        """Delete the unpacked, linked or downloaded files, not the user's own; repeatable."""
        if self.is_downloaded:  # first: it may be registered again while the rest takes long
            self.source.unlink(missing_ok=True)
        if self.root.exists():
            shutil.rmtree(self.root)


def implied_model_name(url: str) -> str:
    """Return the name of a model whose manifest has none: the file's, word characters only."""
    return re.sub(r"\W", "_", Path(url).stem, flags=re.ASCII)


class ArchiveOpener:
    """Finds, downloads, unpacks, reads and removes archives; ``limits`` replace configured ones."""

    def __init__(
        self,
        config: Config,
        workdir: Path,
        helpers: HelperProcesses,
        limits: ArchiveLimits | None = None,
    ) -> None:
        self._config = config
        self._workdir = workdir
        self._helpers = helpers
        self._limits = limits or ArchiveLimits(
            max_bytes=config.max_archive_size or None, download_seconds=config.download_timeout
        )
        downloads = Slots(config.max_downloads, "archives are being downloaded (max_downloads)")
        self._downloader = Downloader(config.allowed_urls, self._limits, downloads, helpers)
        self._removals = DaemonThreads("removal of archives", 4)
        #: The places in a store of downloads that are not opened yet.
        self._downloads: set[Path | None] = set()
        #: By directory: a function of a workflow is a model in the directory of the workflow.
        self._opened: dict[Path, Archive] = {}

    async def open(
        self, url: str, *, s3_sse_kms: bool = False, is_private: bool = False
    ) -> Archive:
        """Open the archive of a model.

        With ``s3_sse_kms`` an http(s) URL leads to S3 and needs AWS credentials. A download that
        ``is_private`` is kept out of the store, which several servers may share, and is deleted
        when it is unpacked.
        """
        archive, contents = await self._open(
            url,
            self._config.model_store,
            "models",
            operation="open",
            is_signed=s3_sse_kms,
            is_private=is_private,
            known_keys=READ_YAML_KEYS,
            needs_requirements=self._config.install_py_dep_per_model,
        )
        return self._watched(replace(archive, contents=Contents.from_json(contents)))

    async def open_workflow(
        self, url: str, *, s3_sse_kms: bool = False
    ) -> tuple[Archive, WorkflowContents]:
        """Open the archive of a workflow by a name in its store, or by a URL."""
        store = self._config.workflows_directory
        try:
            archive, contents = await self._open(
                url, store, "workflows", operation="open_workflow", is_signed=s3_sse_kms
            )
        except ModelNotFound as error:
            raise WorkflowNotFound(error.message) from error
        return self._watched(archive), WorkflowContents.from_json(contents)

    def _watched(self, archive: Archive) -> Archive:
        archive = replace(archive, restore=partial(self._restore, archive, asyncio.Lock()))
        self._opened[archive.directory] = archive
        self._downloads.discard(archive.source)
        return archive

    async def _restore(self, archive: Archive, lock: asyncio.Lock) -> None:
        """Unpack again what something has removed, such as a cleaner of temporary files.

        Raises:
            OSError: It cannot be unpacked; the text names the files that are gone.
        """
        if outer := self._opened.get(archive.source):
            await outer.restore()
        if not await in_abandonable_thread(archive.missing):
            return
        async with lock:  # workers that start at once wait for the first; `unpack_timeout` ends it
            if missing := await in_abandonable_thread(archive.missing):
                await self._unpack_again(archive, missing)

    async def _unpack_again(self, archive: Archive, missing: str) -> None:
        fresh = archive.root.with_name(uuid.uuid4().hex)
        gone = archive.root / missing
        try:
            if await in_abandonable_thread(_version_of, archive.source) != archive.version:
                raise OSError("it is not the file that was registered")  # noqa: TRY301 - one report
            await in_abandonable_thread(make_again, self._workdir)
            await self._helpers.run(
                "unpack",
                source=str(archive.source),
                root=str(fresh),
                limits=self._limits.as_json(),
            )
            await in_abandonable_thread(_add_missing, fresh, archive.root)
        except (OSError, ServeError) as error:
            reason = f"{archive.source} cannot be unpacked again: {error}"
            raise OSError(f"{gone} is gone, and {reason}") from error
        finally:
            await self.remove(Archive("", fresh, fresh, fresh))
        logger.warning("%s is gone; it was unpacked again from %s.", gone, archive.source)

    async def _open(
        self,
        url: str,
        store: Path,
        folder: str,
        *,
        operation: str,
        is_signed: bool,
        is_private: bool = False,
        **arguments: Any,
    ) -> tuple[Archive, dict[str, Any]]:
        is_remote = _is_remote(url, self._config.allowed_urls)
        root = self._workdir / folder / uuid.uuid4().hex
        private = self._workdir / "downloads" / root.name
        made = Archive(url, root, root, root)
        target = self._claimed(url, private if is_private else store) if is_remote else None
        try:
            await in_abandonable_thread(make_again, self._workdir)
            if target:
                if is_private:
                    await in_abandonable_thread(private.mkdir, 0o700, True)  # with its parents
                source, is_new = await self._downloader.download(url, target, is_signed=is_signed)
                made = Archive(url, root, root, source, is_downloaded=is_new)
            found: dict[str, Any] = await self._helpers.run(
                operation,
                url=url,
                store=str(store),
                source=str(target) if target else None,
                root=str(root),
                limits=self._limits.as_json(),
                **arguments,
            )
        except BaseException as error:
            await self.remove(made)
            self._downloads.discard(target)
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise ServeError(f"The archive cannot be opened: {reason}.") from error
            raise
        finally:
            if is_private:
                await self.remove(Archive("", private, private, private))
        directory, source = Path(found["directory"]), Path(found["source"])
        is_kept = made.is_downloaded and not is_private
        files, version = await in_abandonable_thread(_files_and_version, root, source)
        archive = Archive(url, directory, root, source, is_kept, files=files, version=version)
        return archive, found["contents"]

    def _claimed(self, url: str, store: Path) -> Path:
        """Return where to download a URL; ServeError if another archive is, or will be, there."""
        target = target_of(url, store)
        if target in self._downloads or any(
            each.source == target for each in self._opened.values()
        ):
            raise ServeError(f"Model file already exists {target.name}: another model uses it.")
        self._downloads.add(target)
        return target

    async def remove(self, archive: Archive) -> None:
        """Remove an archive in a thread, and wait for that for a limited time."""
        with contextlib.suppress(ServerBusy):  # all threads hang; the server removes it at its end
            removing = asyncio.wrap_future(self._removals.submit(archive.remove))
            await asyncio.wait({removing}, timeout=_REMOVAL_SECONDS)
            if removing.done():
                removing.result()
            else:
                logger.warning("%s is still being removed.", archive.root)
        self._opened.pop(archive.directory, None)


def _version_of(source: Path) -> tuple[int, ...]:
    """Return what changes with the content of a file; raises OSError without the file."""
    status = source.stat()
    return () if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)


def _files_and_version(root: Path, source: Path) -> tuple[Sequence[str], tuple[int, ...]]:
    version: tuple[int, ...] = ()
    with contextlib.suppress(OSError):  # it was a private download, or is gone already
        version = _version_of(source)
    return list(itertools.islice(_names_in(root), _MAX_WATCHED)), version


def _names_in(root: Path) -> Iterator[str]:
    """Yield the paths of all entries below a directory, each directory before its entries."""
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield os.path.relpath(os.path.join(folder, name), root)  # noqa: PTH118 - there may be many


def _add_missing(fresh: Path, root: Path) -> None:
    """Move what a directory lacks from a fresh one of the same archive."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name in list(_names_in(fresh)):
        source, target = fresh / name, root / name
        if not os.path.lexists(target):
            if source.is_dir() and not source.is_symlink():
                target.mkdir(exist_ok=True)
            else:
                source.rename(target)


def make_helpers(config: Config) -> HelperProcesses:
    """Return the helper processes of a server."""
    under_way = "archives are being unpacked (max_unpacking)"
    return HelperProcesses(Slots(config.max_unpacking, under_way), config.unpack_timeout)


def _is_remote(url: str, allowed_urls: Sequence[re.Pattern[str]]) -> bool:
    """Return whether a URL has a scheme; raises ModelNotFound if it is not allowed."""
    if not url:
        raise ModelNotFound("empty url")
    if ".." in unquote(url):  # unquoted: a file URL may spell its dots as %2e
        raise ModelNotFound(f"Relative path is not allowed in url: {without_secrets(url)}")
    scheme = _SCHEME.match(url)
    if scheme is None:
        return False
    if scheme[1].lower() not in ("http", "https", "file", "s3", "gs"):
        raise ModelNotFound(f"Model not found at: {without_secrets(url)}")
    check_allowed(url, allowed_urls)
    return True
