"""``url`` of a registration → a model directory of its own.

Three kinds of URL, tried in this order: one with a scheme is downloaded into the model store
(``download.py``); a file in the store is unpacked (``unpack.py``); a directory, given as a path or
lying in the store, is linked, so that changes to a handler are seen by the next worker.

A path to a file counts where it leads into the store. Of any other the last part is looked up in
the store, whatever lies at the path, as in TorchServe: clients such as mlflow-torchserve name the
file they have packed by its own path. Nothing outside the store is read, and it is logged.

All of this but the download is done by a helper process (`helper_process`), which also reads what
the server has to know of the model's files.

The archives of workflows (``.war``) are opened in the same way, but their URL is that of a file: of
one to be downloaded, or the name of one in their store.

Every directory handed out is ``<workdir>/models/<32 hex>`` (``workflows`` of those) or lies in it,
and `Archive.remove` deletes just that. A failure leaves nothing behind: no directory, no download.
"""

import asyncio
import contextlib
import logging
import re
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from marserve.frontend.aio.background import DaemonThreads, Slots, in_abandonable_thread
from marserve.frontend.archives.contents import Contents
from marserve.frontend.archives.download import Downloader, Source, check_allowed
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.archives.workflow_contents import WorkflowContents
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.unread_keys import YAML_KEYS
from marserve.frontend.errors import ModelNotFound, ServeError, ServerBusy, WorkflowNotFound

logger = logging.getLogger(__name__)

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_FETCHED_SCHEMES = ("http", "https", "file", "s3", "gs")
_REMOVAL_THREADS = 4
_REMOVAL_SECONDS = 10.0  # that somebody waits for files to be removed


@dataclass(frozen=True)
class Archive:
    """A model's files, ready for a worker."""

    url: str  # as it was given
    directory: Path  # where the model lives; for a plain directory a link to it
    root: Path  # what exists for this archive alone, and goes with it
    source: Path  # the file or directory that it was made of
    is_downloaded: bool = False  # then the source was put into the model store
    contents: Contents = field(default_factory=Contents)  # what the server has to know of a model

    def remove(self) -> None:
        """Delete what was unpacked, linked or downloaded, never the user's own; repeatable."""
        if self.is_downloaded:  # first, for it may be registered again while the rest takes long
            self.source.unlink(missing_ok=True)
        if self.root.exists():
            shutil.rmtree(self.root)


def implied_model_name(url: str) -> str:
    """The name of a model whose manifest has none: the file's, word characters only."""
    return re.sub(r"\W", "_", Path(url).stem, flags=re.ASCII)


@dataclass(frozen=True)
class ArchivePlaces:
    """Where archives come from and go to."""

    model_store: Path | None
    workdir: Path  # where they are unpacked
    allowed_urls: Sequence[re.Pattern[str]] = ()
    workflow_store: Path | None = None


class ArchiveOpener:
    """Finds, fetches, unpacks and reads archives, and removes what was made of them.

    Args:
        places: Where they come from and go to.
        limits: How much one may cost.
        downloads: How many are downloaded at once.
        helpers: The processes that unpack and read them.
        needs_requirements: Whether a requirements file has to be there that a manifest names.
    """

    def __init__(
        self,
        places: ArchivePlaces,
        limits: ArchiveLimits,
        downloads: Slots,
        helpers: HelperProcesses,
        *,
        needs_requirements: bool = False,
    ) -> None:
        self._places = places
        self._limits = limits
        self._helpers = helpers
        self._downloader = Downloader(limits, downloads, helpers)
        self._needs_requirements = needs_requirements
        self._removals = DaemonThreads("removal of archives", _REMOVAL_THREADS)

    async def open(
        self, url: str, *, s3_sse_kms: bool = False, is_private: bool = False
    ) -> Archive:
        """Find or fetch an archive and unpack it; takes minutes where models are large.

        ``url`` is a name in the store, a directory's path or a URL, which one of ``allowed_urls``
        must match as a whole, in any case of letters. With ``s3_sse_kms`` an http(s) URL leads to
        S3 and is asked with AWS credentials. A download that ``is_private`` never comes into the
        store, which several servers may share, and is gone once it is unpacked. Cancelled, it
        leaves nothing behind, as after a failure.

        Raises:
            ModelNotFound: There is no such archive, or it must not be asked for.
            ModelFileExists: A download would replace a file in the store.
            DownloadFailed: A download did not come through.
            ArchiveRefused: The archive is unreadable or unsafe, or cannot be served.
            ServerBusy: Too many are opened already.
            ServeError: The host does not let it be opened, as on a full disk.
        """
        source = Source(url, self._places.allowed_urls, s3_sse_kms)
        archive, contents = await self._open(
            source,
            self._places.model_store,
            "models",
            operation="open",
            is_private=is_private,
            known_keys=YAML_KEYS,
            needs_requirements=self._needs_requirements,
        )
        return replace(archive, contents=Contents.from_json(contents))

    async def open_workflow(
        self, url: str, *, s3_sse_kms: bool = False
    ) -> tuple[Archive, WorkflowContents]:
        """The same for the archive of a workflow, a name in the store or a URL.

        Raises:
            WorkflowNotFound: There is no such archive, or it must not be asked for.
            WorkflowRefused: Its manifest or its specification cannot be read.
            ServeError: As `open`.
        """
        source = Source(url, self._places.allowed_urls, s3_sse_kms)
        store = self._places.workflow_store
        try:
            archive, contents = await self._open(
                source, store, "workflows", operation="open_workflow"
            )
        except ModelNotFound as error:
            raise WorkflowNotFound(error.message) from error
        return archive, WorkflowContents.from_json(contents)

    async def _open(
        self,
        wanted: Source,
        store: Path | None,
        folder: str,
        *,
        operation: str,
        is_private: bool = False,
        **arguments: Any,
    ) -> tuple[Archive, dict[str, Any]]:
        """Open an archive by an operation of `helper`; returns what that has read, too."""
        url = wanted.url
        store = _checked_store(url, store)
        root = self._places.workdir / folder / uuid.uuid4().hex
        made = Archive(url, root, root, root)
        async with AsyncExitStack() as until_unpacked:
            if scheme := _SCHEME.match(url):
                if scheme[1].lower() not in _FETCHED_SCHEMES:
                    raise ModelNotFound(f"Model not found at: {url}")
                check_allowed(url, self._places.allowed_urls)
                place = store
                if is_private:
                    place = await until_unpacked.enter_async_context(self._private_place(root))
                source = await self._downloader.download(wanted, place)
                made = Archive(url, root, root, source, is_downloaded=True)
            try:
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
                    raise _cannot_open(error) from error
                raise
        directory, source = Path(found["directory"]), Path(found["source"])
        is_kept = made.is_downloaded and not is_private
        return Archive(url, directory, root, source, is_kept), found["contents"]

    @contextlib.asynccontextmanager
    async def _private_place(self, root: Path) -> AsyncIterator[Path]:
        """A directory beside that of the unpacked archive, for a download; gone after the block."""
        place = root.parent.with_name("downloads") / root.name
        try:
            await in_abandonable_thread(_make_directory, place)
        except OSError as error:
            raise _cannot_open(error) from error
        try:
            yield place
        finally:
            await self.remove(Archive("", place, place, place))

    async def remove(self, archive: Archive) -> None:
        """See `Archive.remove`; a disk that does not answer is left to a thread after a while."""
        with contextlib.suppress(ServerBusy):  # then nobody could, and the end of the server will
            removing = asyncio.wrap_future(self._removals.submit(archive.remove))
            await asyncio.wait({removing}, timeout=_REMOVAL_SECONDS)
            if removing.done():
                removing.result()
            else:
                logger.warning("%s is still being removed; going on.", archive.root)


def _make_directory(path: Path) -> None:
    path.mkdir(mode=0o700, parents=True)


def _cannot_open(error: OSError) -> ServeError:
    return ServeError(f"The archive cannot be opened: {error.strerror or error}.")


def make_helpers(config: Config) -> HelperProcesses:
    """The helper processes of a server."""
    under_way = "archives are being unpacked (max_unpacking)"
    return HelperProcesses(Slots(config.max_unpacking, under_way), config.unpack_timeout)


def make_opener(config: Config, workdir: Path, helpers: HelperProcesses) -> ArchiveOpener:
    """What opens the archives of a server."""
    return ArchiveOpener(
        ArchivePlaces(config.model_store, workdir, config.allowed_urls, config.workflows_directory),
        ArchiveLimits(
            max_bytes=config.max_archive_size or None, download_seconds=config.download_timeout
        ),
        Slots(config.max_downloads, "archives are being downloaded (max_downloads)"),
        helpers,
        needs_requirements=config.install_py_dep_per_model,
    )


def _checked_store(url: str, store: Path | None) -> Path:
    if not url:
        raise ModelNotFound("empty url")
    if ".." in unquote(url):  # unquoted: a file URL may spell its dots as %2e
        raise ModelNotFound(f"Relative path is not allowed in url: {url}")
    if store is None:
        raise ModelNotFound("Model store has not been configured.")
    return store
