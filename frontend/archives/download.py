"""http(s), s3, gs or file URL → a new file in the model store.

A download grows under a hidden temporary name and gets its own name only when it is complete, so
neither `load_models=all` nor a registration by name ever meets half an archive. A file of this
machine is copied by a helper process, as it may lie on a disk that does not answer. Every redirect
is held against ``allowed_urls`` again: else any allowed host could send the server to places that
only the server can reach.
"""

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp

from marserve.frontend.aio.background import DaemonThreads, Slots, in_abandonable_thread
from marserve.frontend.archives.google_storage import authorised_request
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.http_client import (
    HEADERS,
    failure_of,
    http_client,
    proxy_of,
    reason_of,
    url_of,
)
from marserve.frontend.archives.s3 import Signer
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.errors import (
    ArchiveRefused,
    DownloadFailed,
    ModelFileExists,
    ModelNotFound,
    ServerBusy,
)
from marserve.frontend.logs.formats import one_line

_CHUNK_BYTES = 1 << 20
_PROGRESS_BYTES = 1 << 16  # of which each must come within the time that a peer may be silent
_DISK_THREADS = 8
_DISCARD_SECONDS = 5.0
_ABANDONED_SECONDS = 3600.0
_PART_NAME = re.compile(r"\.[0-9a-f]{32}\.part")
_MAX_REDIRECTS = 10
_REDIRECTS = (301, 302, 303, 307, 308)

logger = logging.getLogger(__name__)


class _Broken(Exception):
    """A download that ended, for a reason that only the log shows."""


def check_allowed(url: str, allowed_urls: Sequence[re.Pattern[str]]) -> None:
    """Let a URL pass that one pattern matches as a whole, in any case of letters.

    Raises:
        ModelNotFound: None does.
    """
    for pattern in allowed_urls:
        if re.compile(pattern.pattern, pattern.flags | re.IGNORECASE).fullmatch(url):
            return
    if url.lower().startswith(("s3:", "gs:")):  # unknown to TorchServe: its words, and the reason
        raise ModelNotFound(f"Model not found at: {url}: allowed_urls has no pattern for it.")
    raise ModelNotFound(f"Given URL {url} does not match any allowed URL(s)")


@dataclass(frozen=True)
class Source:
    """Where an archive is fetched from."""

    url: str
    allowed_urls: Sequence[re.Pattern[str]]  # what redirects must match too
    is_signed: bool = False  # whether to ask with AWS credentials; s3 URLs always are


class Downloader:
    """Fetches archives, so many at once; ``helpers`` copy those that are files here."""

    def __init__(self, limits: ArchiveLimits, slots: Slots, helpers: HelperProcesses) -> None:
        self._limits = limits
        self._slots = slots
        self._helpers = helpers
        #: For the disk, which may have to be waited for: requests are served meanwhile.
        self._disk = DaemonThreads("writing of downloads", _DISK_THREADS)

    async def download(self, source: Source, store: Path) -> Path:
        """Fetch an allowed URL into the store, under its own file name.

        Raises:
            ModelNotFound: A redirect leads where ``allowed_urls`` does not, or the URL names no
                file.
            ModelFileExists: The store has a file of that name.
            DownloadFailed: Anything that went wrong on the way; the reason is logged.
            ServerBusy: Too many are under way.
        """
        url = source.url
        name = _file_name(url)
        part = _PartFile(store, name)
        try:
            await self._disk.run(part.check_name)
            await self._disk.run(_remove_abandoned, store, 2 * self._limits.stall_seconds)
            async with asyncio.timeout(self._limits.download_seconds):
                await self._fetch_into(source, part)
            await self._disk.run(part.publish)
        except (_Broken, OSError, aiohttp.ClientError, ValueError) as error:
            is_late = isinstance(error, TimeoutError)
            reason = "it takes too long" if is_late and not str(error) else failure_of(error)
            logger.warning("Download of %s failed: %s", one_line(url), reason)
            raise DownloadFailed(f"Failed to download archive from: {url}") from error
        finally:
            await self._discard(part)
        return part.target

    async def _discard(self, part: "_PartFile") -> None:
        """Remove what is left of a download; a disk that does not answer is not waited for."""
        with contextlib.suppress(TimeoutError, ServerBusy):
            async with asyncio.timeout(_DISCARD_SECONDS):
                await self._disk.run(part.discard)

    async def _fetch_into(self, source: Source, part: "_PartFile") -> None:
        if urlsplit(source.url).scheme == "file":
            path, limits = str(_local_path(source.url)), self._limits.as_json()
            try:
                await self._helpers.run("copy", source=path, target=str(part.path), limits=limits)
            except (DownloadFailed, ArchiveRefused) as error:
                raise _Broken(str(error)) from error
            return
        async with self._slots.taken():
            room = await self._disk.run(self._limits.room_in, part.path.parent)
            await self._disk.run(part.open)
            await self._transfer(source, part, room)

    async def _transfer(self, source: Source, part: "_PartFile", room: int) -> None:
        """Write what is behind a URL into a file, as long as it gets on."""
        loop, stall = asyncio.get_running_loop(), self._limits.stall_seconds
        received = due = 0
        async with asyncio.timeout(stall) as patience, aclosing(_fetch(source, stall)) as pieces:
            async for piece in pieces:
                received += len(piece)
                if received > room:
                    raise _Broken(f"it is larger than the {room} bytes it may have")
                await self._disk.run(part.write, piece)
                if received >= due:
                    due = received + _PROGRESS_BYTES
                    patience.reschedule(loop.time() + stall)


def _file_name(url: str) -> str:
    malformed = DownloadFailed(f"Failed to download archive from: {url}")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:  # brackets without an address, or a port that is no number
        raise malformed from error
    if parts.scheme in ("http", "https") and not parts.hostname:
        raise malformed
    name = parts.path.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise ModelNotFound(f"Model not found at: {url}")
    return name


class _PartFile:
    """A file of the store while it is written, and its name when it is complete; blocks."""

    def __init__(self, store: Path, name: str) -> None:
        self.path = store / f".{uuid.uuid4().hex}.part"
        self.target = store / name
        self._file: IO[bytes] | None = None

    def check_name(self) -> None:
        if self.target.exists() or self.target.is_symlink():
            raise ModelFileExists(f"Model file already exists {self.target.name}")

    def open(self) -> None:
        self._file = self.path.open("xb")

    def write(self, piece: bytes) -> None:
        assert self._file is not None, "open() comes first"
        self._file.write(piece)

    def publish(self) -> None:
        """Give it its name, never over another file.

        The name is claimed first and then replaced: `os.link` would do it in one step, but not on
        every file system that model stores live on.
        """
        self._close()
        try:
            self.target.touch(exist_ok=False)
        except FileExistsError as error:
            raise ModelFileExists(f"Model file already exists {self.target.name}") from error
        try:
            self.path.replace(self.target)
        except BaseException:
            self.target.unlink(missing_ok=True)
            raise

    def discard(self) -> None:
        """Remove it, unless it has its name."""
        with contextlib.suppress(OSError):
            self._close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def _remove_abandoned(store: Path, stall: float) -> None:
    """Remove what servers that were killed have left of their downloads.

    A living one writes to its file all the time, or gives up. The hour is for clocks that differ.
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
    if ".." in path.parts:  # urlsplit drops tabs and line breaks, even from between two dots
        raise _Broken("a relative path")
    return path


# -- http and https --------------------------------------------------------------------------------


async def _fetch(source: Source, stall: float) -> AsyncGenerator[bytes]:
    """Yield an answer's body; follows redirects to allowed URLs only."""
    url, headers = source.url, dict(HEADERS)
    scheme = urlsplit(url).scheme
    # Either may ask the machine for its role, which can take its time.
    if source.is_signed or scheme == "s3":
        url, signature = await in_abandonable_thread(Signer().sign, url)
        headers |= signature
    elif scheme == "gs":
        url, token = await in_abandonable_thread(authorised_request, url)
        headers |= token
    async with http_client(stall, read_bytes=_CHUNK_BYTES) as client:
        for _ in range(_MAX_REDIRECTS):
            async with client.get(
                url_of(url), headers=headers, allow_redirects=False, proxy=proxy_of(url)
            ) as response:
                if response.status == HTTPStatus.OK:
                    async for piece in response.content.iter_chunked(_CHUNK_BYTES):
                        yield piece
                    return
                location = response.headers.get("location")
                if response.status not in _REDIRECTS or location is None:
                    raise _Broken(await reason_of(response))
            url, headers = urljoin(url, location), HEADERS  # not signed: it may be anybody's
            if urlsplit(url).scheme not in ("http", "https"):
                raise _Broken(f"a redirect to {url}")
            check_allowed(url, source.allowed_urls)
    raise _Broken("too many redirects")
