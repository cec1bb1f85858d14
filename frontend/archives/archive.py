"""Open the archive at the ``url`` of a registration: download, unpack and read it.

A URL with a scheme is downloaded into the model store. Otherwise a file in the store is unpacked,
or a directory is linked, so that the next worker sees changes of a handler. No file outside the
store is read: its path means the file of that name in the store, as in TorchServe, because
mlflow-torchserve sends the path of the file it has packed.

An archive is opened into ``<workdir>/models/<32 hex>`` (``workflows/`` for those), which
`Archive.remove` deletes. A failure leaves neither a directory nor a download.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from marserve.frontend.aio.background import DaemonThreads, Slots, in_abandonable_thread
from marserve.frontend.archives.contents import Contents, WorkflowContents
from marserve.frontend.archives.download import Downloader, check_allowed
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.unread_keys import READ_YAML_KEYS
from marserve.frontend.errors import ModelNotFound, ServeError, ServerBusy, WorkflowNotFound

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_REMOVAL_SECONDS = 10.0  # for which callers wait for a removal


@dataclass(frozen=True)
class Archive:
    """The files of a model, ready for a worker."""

    url: str  # of the registration
    directory: Path  # of the model; a link if the model is a directory of the user
    root: Path  # directory that exists for this archive alone
    source: Path  # file or directory that was opened
    is_downloaded: bool = False  # whether the source was downloaded into the model store
    contents: Contents = field(default_factory=Contents)  # of a model; empty for a workflow

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
        return replace(archive, contents=Contents.from_json(contents))

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
        return archive, WorkflowContents.from_json(contents)

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
        try:
            if is_remote:
                if is_private:
                    await in_abandonable_thread(private.mkdir, 0o700, True)  # with its parents
                place = private if is_private else store
                source = await self._downloader.download(url, place, is_signed=is_signed)
                made = Archive(url, root, root, source, is_downloaded=True)
            found: dict[str, Any] = await self._helpers.run(
                operation,
                url=url,
                store=str(store),
                source=str(made.source) if made.is_downloaded else None,
                root=str(root),
                limits=self._limits.as_json(),
                **arguments,
            )
        except BaseException as error:
            await self.remove(made)
            if isinstance(error, OSError):
                reason = error.strerror or error
                raise ServeError(f"The archive cannot be opened: {reason}.") from error
            raise
        finally:
            if is_private:
                await self.remove(Archive("", private, private, private))
        directory, source = Path(found["directory"]), Path(found["source"])
        is_kept = made.is_downloaded and not is_private
        return Archive(url, directory, root, source, is_kept), found["contents"]

    async def remove(self, archive: Archive) -> None:
        """Remove an archive in a thread, and wait for that for a limited time."""
        with contextlib.suppress(ServerBusy):  # all threads hang; the server removes it at its end
            removing = asyncio.wrap_future(self._removals.submit(archive.remove))
            await asyncio.wait({removing}, timeout=_REMOVAL_SECONDS)
            if removing.done():
                removing.result()
            else:
                logger.warning("%s is still being removed.", archive.root)


def make_helpers(config: Config) -> HelperProcesses:
    """Return the helper processes of a server."""
    under_way = "archives are being unpacked (max_unpacking)"
    return HelperProcesses(Slots(config.max_unpacking, under_way), config.unpack_timeout)


def _is_remote(url: str, allowed_urls: Sequence[re.Pattern[str]]) -> bool:
    """Return whether a URL has a scheme; raises ModelNotFound if it is not allowed."""
    if not url:
        raise ModelNotFound("empty url")
    if ".." in unquote(url):  # unquoted: a file URL may spell its dots as %2e
        raise ModelNotFound(f"Relative path is not allowed in url: {url}")
    scheme = _SCHEME.match(url)
    if scheme is None:
        return False
    if scheme[1].lower() not in ("http", "https", "file", "s3", "gs"):
        raise ModelNotFound(f"Model not found at: {url}")
    check_allowed(url, allowed_urls)
    return True
