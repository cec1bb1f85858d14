"""Download an http(s), s3, gs or file URL to a new file in the model store.

A download has a hidden temporary name until it is complete, so that neither ``load_models=all`` nor
a registration by name reads an incomplete archive. It replaces no file; the same file, which an
earlier run of the server may have left, is used as it is.

``allowed_urls`` is checked for every redirect too: otherwise an allowed host could make the server
send requests to addresses that only the server can reach.
"""

import asyncio
import contextlib
import filecmp
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO, NamedTuple
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp

from marserve.frontend.aio.background import DaemonThreads, Slots, in_abandonable_thread
from marserve.frontend.archives.google_storage import authorised_request
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.http_client import failure_of, get, http_client, reason_of
from marserve.frontend.archives.s3 import Signer
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.configuration.values import without_secrets
from marserve.frontend.errors import (
    ArchiveRefused,
    DownloadFailed,
    ModelNotFound,
    ServeError,
    ServerBusy,
)
from marserve.frontend.logs.formats import one_line

_CHUNK_BYTES = 1 << 20
_MAX_REDIRECTS = 10
_PROGRESS_BYTES = 1 << 16  # that must arrive within the time that a peer may be silent
_ABANDONED_SECONDS = 3600.0
_PART_NAME = re.compile(r"\.[0-9a-f]{32}\.part")

logger = logging.getLogger(__name__)


class _Broken(Exception):
    """A download that failed, and the reason."""


def check_allowed(url: str, allowed_urls: Sequence[re.Pattern[str]]) -> None:
    """Raise ModelNotFound unless a pattern matches the whole URL, ignoring case."""
    for pattern in allowed_urls:
        if re.compile(pattern.pattern, pattern.flags | re.IGNORECASE).fullmatch(url):
            return
    if url.lower().startswith(("s3:", "gs:")):  # TorchServe does not know these schemes
        raise ModelNotFound(
            f"Model not found at: {without_secrets(url)}: allowed_urls has no pattern for it."
        )
    raise ModelNotFound(f"Given URL {without_secrets(url)} does not match any allowed URL(s)")


def download_failed(url: str, reason: str) -> DownloadFailed:
    """Return the error of a URL that cannot be downloaded; the text begins as TorchServe's."""
    return DownloadFailed(f"Failed to download archive from: {without_secrets(url)}: {reason}")


class Downloaded(NamedTuple):
    """A file of the store, and whether it was made by the download."""

    path: Path
    is_new: bool


@dataclass(eq=False)
class Downloader:
    """Downloads archives."""

    allowed_urls: Sequence[re.Pattern[str]]
    limits: ArchiveLimits
    slots: Slots
    helpers: HelperProcesses  # copy local files

    def __post_init__(self) -> None:
        self._disk = DaemonThreads("writing of downloads", 8)

    async def download(self, url: str, target: Path, *, is_signed: bool) -> Downloaded:
        """Download an allowed URL to its target (`target_of`).

        An http(s) URL that ``is_signed`` needs AWS credentials, as s3 URLs always do.

        Raises:
            DownloadFailed: It cannot be downloaded; the reason has no user and query of a URL.
            ServeError: There is another file.
        """
        store, part = target.parent, _PartFile(target)
        try:
            await self._disk.run(part.check_name)
            await self._disk.run(_remove_abandoned, store, 2 * self.limits.stall_seconds)
            async with asyncio.timeout(self.limits.download_seconds):
                await self._fetch_into(url, part, is_signed=is_signed)
            return Downloaded(target, await self._disk.run(part.publish))
        except (_Broken, OSError, aiohttp.ClientError, ValueError) as error:
            is_late = isinstance(error, TimeoutError)
            reason = "it takes too long" if is_late and not str(error) else failure_of(error)
            logger.warning("Download of %s failed: %s", one_line(url), reason)
            raise download_failed(url, f"{reason}.") from error
        finally:
            await self._discard(part)

    async def _discard(self, part: "_PartFile") -> None:
        with contextlib.suppress(TimeoutError, ServerBusy):
            async with asyncio.timeout(5.0):
                await self._disk.run(part.discard)

    async def _fetch_into(self, url: str, part: "_PartFile", *, is_signed: bool) -> None:
        if urlsplit(url).scheme == "file":
            path, limits = str(_local_path(url)), self.limits.as_json()
            try:
                await self.helpers.run("copy", source=path, target=str(part.path), limits=limits)
            except (DownloadFailed, ArchiveRefused) as error:
                raise _Broken(str(error)) from error
            return
        async with self.slots.taken():
            room = await self._disk.run(self.limits.room_in, part.path.parent)
            await self._disk.run(part.open)
            await self._write(self._fetch(url, is_signed=is_signed), part, room)

    async def _write(self, pieces: AsyncGenerator[bytes], part: "_PartFile", room: int) -> None:
        """Write the pieces of a download, each of which must arrive in time."""
        loop, stall = asyncio.get_running_loop(), self.limits.stall_seconds
        received = due = 0
        async with asyncio.timeout(stall) as patience, aclosing(pieces):
            async for piece in pieces:
                received += len(piece)
                if received > room:
                    raise _Broken(f"it is larger than the {room} bytes it may have")
                await self._disk.run(part.write, piece)
                if received >= due:
                    due = received + _PROGRESS_BYTES
                    patience.reschedule(loop.time() + stall)

    async def _fetch(self, url: str, *, is_signed: bool) -> AsyncGenerator[bytes]:
        headers: Mapping[str, str] = {}
        scheme = urlsplit(url).scheme
        # In a thread: either may send a request for the machine's credentials.
        if is_signed or scheme == "s3":
            url, headers = await in_abandonable_thread(Signer().sign, url)
        elif scheme == "gs":
            url, headers = await in_abandonable_thread(authorised_request, url)
        async with http_client(self.limits.stall_seconds, read_bytes=_CHUNK_BYTES) as client:
            for _ in range(_MAX_REDIRECTS):
                async with get(client, url, headers) as response:
                    if response.status == HTTPStatus.OK:
                        async for piece in response.content.iter_chunked(_CHUNK_BYTES):
                            yield piece
                        return
                    location = response.headers.get("location")
                    if response.status not in (301, 302, 303, 307, 308) or location is None:
                        raise _Broken(await reason_of(response))
                url, headers = urljoin(url, location), {}  # without credentials
                if urlsplit(url).scheme not in ("http", "https"):
                    raise _Broken(f"a redirect to {without_secrets(url)}")
                check_allowed(url, self.allowed_urls)
        raise _Broken("too many redirects")


def target_of(url: str, store: Path) -> Path:
    """Return the path of a download in the store; its name is that of the URL's file.

    Raises:
        DownloadFailed, ModelNotFound: The URL has no host or no file.
    """
    malformed = download_failed(url, "the URL is malformed.")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # invalid brackets or port
        raise malformed from error
    if parts.scheme in ("http", "https") and not parts.hostname:
        raise malformed
    name = parts.path.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise ModelNotFound(f"Model not found at: {without_secrets(url)}")
    return store / name


class _PartFile:
    """A file of the store under a temporary name, and its final name; all methods block."""

    def __init__(self, target: Path) -> None:
        self.path = target.with_name(f".{uuid.uuid4().hex}.part")
        self.target = target
        self._file: IO[bytes] | None = None

    def check_name(self) -> None:
        """Raise ServeError if the final name is that of a directory or a broken link.

        Raises OSError for a name that no file can have.
        """
        with contextlib.suppress(FileNotFoundError):
            self.target.lstat()
            if not self.target.is_file():
                raise ServeError(f"Model file already exists {self.target.name}: it is no file.")

    def open(self) -> None:
        self._file = self.path.open("xb")

    def write(self, piece: bytes) -> None:
        assert self._file is not None, "open() comes first"
        self._file.write(piece)

    def publish(self) -> bool:
        """Rename it to its final name; return False if that is the name of an equal file.

        An empty file claims the name first: `os.link` would do it in one step, but not on every
        file system.

        Raises:
            ServeError: It is the name of another file, which is not replaced.
        """
        self._close()
        try:
            self.target.touch(exist_ok=False)
        except FileExistsError as error:
            if self.target.is_file() and filecmp.cmp(self.path, self.target, shallow=False):
                return False
            raise ServeError(
                f"Model file already exists {self.target.name}: the model store has another file "
                "of this name. Register that by its name, or delete it."
            ) from error
        try:
            self.path.replace(self.target)
        except BaseException:
            self.target.unlink(missing_ok=True)
            raise
        return True

    def discard(self) -> None:
        """Remove it, unless it has its final name."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def _remove_abandoned(store: Path, stall: float) -> None:
    """Remove incomplete downloads of servers that were killed.

    A running download writes or fails within ``stall`` seconds; the hour allows for other clocks.
    """
    oldest = time.time() - max(_ABANDONED_SECONDS, stall)
    for path in store.glob(".*.part"):
        with contextlib.suppress(OSError):
            if _PART_NAME.fullmatch(path.name) and path.lstat().st_mtime < oldest:
                path.unlink()
                logger.info("Removed %s, which a dead server had left.", path)


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost"):
        raise _Broken("a file URL with a host")
    if ".." in path.parts:  # urlsplit drops tabs and line breaks, also between two dots
        raise _Broken("a relative path")
    return path
