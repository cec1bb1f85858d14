"""http(s) or file URL → a new file in the model store.

A download grows under a hidden temporary name and gets its own name only when it is complete, so
neither `load_models=all` nor a registration by name ever meets half an archive. Every redirect is
held against ``allowed_urls`` again: else any allowed host could send the server to places that only
the server can reach.
"""

import contextlib
import http.client
import io
import logging
import re
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from marserve.frontend.errors import DownloadFailed, ModelFileExists, ModelNotFound
from marserve.frontend.models.unpack import ArchiveLimits

_CHUNK_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class _Broken(Exception):
    """A download that ended, for a reason that only the log is told."""


def check_allowed(url: str, allowed_urls: Sequence[re.Pattern[str]]) -> None:
    """Lets a URL pass that one pattern matches as a whole, in any case of letters.

    Raises:
        ModelNotFound: None does.
    """
    for pattern in allowed_urls:
        if re.compile(pattern.pattern, pattern.flags | re.IGNORECASE).fullmatch(url):
            return
    raise ModelNotFound(f"Given URL {url} does not match any allowed URL(s)")


def download(
    url: str, store: Path, allowed_urls: Sequence[re.Pattern[str]], limits: ArchiveLimits
) -> Path:
    """Fetches an allowed URL into the store, under its own file name; blocks.

    Raises:
        ModelNotFound: A redirect leads where ``allowed_urls`` does not, or the URL names no file.
        ModelFileExists: The store has a file of that name.
        DownloadFailed: Anything that went wrong on the way; the reason is logged.
    """
    part = store / f".{uuid.uuid4().hex}.part"
    try:
        target = store / _file_name(url)
        _refuse_existing(target)
        _transfer(url, part, allowed_urls, limits)
        _publish(part, target)
    except (_Broken, OSError, http.client.HTTPException, ValueError) as error:
        logger.warning("Download of %s failed: %s", url, str(error) or type(error).__name__)
        raise DownloadFailed(f"Failed to download archive from: {url}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return target


def _file_name(url: str) -> str:
    name = urlsplit(url).path.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise ModelNotFound(f"Model not found at: {url}")
    return name


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise ModelFileExists(f"Model file already exists {target.name}")


def _publish(part: Path, target: Path) -> None:
    """Gives a complete download its name, never over another file.

    The name is claimed first and then replaced: `os.link` would do it in one step, but not on every
    file system that model stores live on.
    """
    try:
        target.touch(exist_ok=False)
    except FileExistsError as error:
        raise ModelFileExists(f"Model file already exists {target.name}") from error
    try:
        part.replace(target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _transfer(
    url: str, part: Path, allowed_urls: Sequence[re.Pattern[str]], limits: ArchiveLimits
) -> None:
    deadline = time.monotonic() + limits.download_seconds
    with _source(url, allowed_urls, limits.stall_seconds) as (source, expected):
        with part.open("xb") as file:
            received = _copy(source, file, part.parent, deadline, limits)
        if expected is not None and received != expected:
            raise _Broken(f"{received} bytes came, {expected} were announced")


def _copy(
    source: io.BufferedReader | http.client.HTTPResponse,
    file: IO[bytes],
    directory: Path,
    deadline: float,
    limits: ArchiveLimits,
) -> int:
    """Copies to the end; the number of bytes.

    read1 returns what is there: a read of a whole chunk would let a peer that drips bytes keep us
    past every deadline.
    """
    received, room = 0, limits.room_in(directory)
    while chunk := source.read1(_CHUNK_BYTES):
        limits.check_cancelled()
        received += len(chunk)
        if received > room:
            raise _Broken(f"it is larger than the {room} bytes it may have")
        if time.monotonic() > deadline:
            raise _Broken("it takes too long")
        file.write(chunk)
    return received


@contextlib.contextmanager
def _source(
    url: str, allowed_urls: Sequence[re.Pattern[str]], timeout: float
) -> Iterator[tuple[io.BufferedReader | http.client.HTTPResponse, int | None]]:
    """The bytes behind a URL, and how many there should be where that is known."""
    if urlsplit(url).scheme == "file":
        path = _local_path(url)
        with path.open("rb") as file:
            yield file, path.stat().st_size
    else:
        with _open_http(url, allowed_urls, timeout) as response:
            yield response, response.length


def _local_path(url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc not in ("", "localhost"):
        raise _Broken("a file URL with a host")
    if ".." in path.parts:  # urlsplit drops tabs and line breaks, even from between two dots
        raise _Broken("a relative path")
    if not path.is_file():  # a device or a pipe would never end
        raise _Broken("no such file")
    return path


def _open_http(
    url: str, allowed_urls: Sequence[re.Pattern[str]], timeout: float
) -> http.client.HTTPResponse:
    try:
        response = _opener(allowed_urls).open(url, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        raise
    assert isinstance(response, http.client.HTTPResponse)
    if response.status != http.client.OK:
        response.close()
        raise _Broken(f"status {response.status}")
    return response


def _opener(allowed_urls: Sequence[re.Pattern[str]]) -> urllib.request.OpenerDirector:
    """A client for http and https alone; urllib's own would follow redirects to ftp as well."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
        _CheckedRedirects(allowed_urls),
    ):
        opener.add_handler(handler)
    return opener


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to allowed URLs only.

    Args:
        allowed_urls: See `check_allowed`.
    """

    def __init__(self, allowed_urls: Sequence[re.Pattern[str]]) -> None:
        self._allowed_urls = allowed_urls

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: Message,
        newurl: str,
    ) -> urllib.request.Request | None:
        """The next request, unless its URL is forbidden."""
        fp.close()  # urllib would read the body first, however long it is
        check_allowed(newurl, self._allowed_urls)
        return super().redirect_request(req, fp, code, msg, headers, newurl)  # type: ignore[arg-type]
