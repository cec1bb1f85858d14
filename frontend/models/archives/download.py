"""http(s), s3 or file URL → a new file in the model store.

A download grows under a hidden temporary name and gets its own name only when it is complete, so
neither `load_models=all` nor a registration by name ever meets half an archive. Every redirect is
held against ``allowed_urls`` again: else any allowed host could send the server to places that only
the server can reach.

A transfer has a thread of its own. Looking up a name, connecting, greeting, waiting for bytes: each
can take as long as the other side likes, and no call ends them all. So when the server stops, the
thread is left behind instead, with a file that has no name any more.
"""

import concurrent.futures
import contextlib
import http.client
import io
import logging
import re
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urlsplit

from marserve.frontend.errors import DownloadFailed, ModelFileExists, ModelNotFound
from marserve.frontend.logs.setup import one_line
from marserve.frontend.models.archives.s3 import signed_request
from marserve.frontend.models.archives.unpack import ArchiveLimits

_CHUNK_BYTES = 1 << 20
_LOOK_UP_SECONDS = 0.25  # how often the one who waits looks whether to go on
_ERROR_BYTES = 4096
_S3_ERROR_CODE = re.compile(rb"<Code>(\w+)</Code>")

logger = logging.getLogger(__name__)


class _Broken(Exception):
    """A download that ended, for a reason that only the log is told."""


def check_allowed(url: str, allowed_urls: Sequence[re.Pattern[str]]) -> None:
    """Lets a URL pass that one pattern matches as a whole, in any case of letters.

    Raises:
        ModelNotFound: None does. For s3 URLs, which the default of ``allowed_urls`` leaves out, the
            sentence begins as TorchServe's, which did not know them.
    """
    for pattern in allowed_urls:
        if re.compile(pattern.pattern, pattern.flags | re.IGNORECASE).fullmatch(url):
            return
    if urlsplit(url).scheme == "s3":
        raise ModelNotFound(f"Model not found at: {url}: allowed_urls has no pattern for it.")
    raise ModelNotFound(f"Given URL {url} does not match any allowed URL(s)")


@dataclass(frozen=True)
class Source:
    """Where an archive is fetched from.

    Attributes:
        url: Its URL.
        allowed_urls: What redirects must match too.
        limits: How much it may cost.
        is_signed: Whether to ask with AWS credentials; s3 URLs always are.
    """

    url: str
    allowed_urls: Sequence[re.Pattern[str]]
    limits: ArchiveLimits
    is_signed: bool = False


def download(source: Source, store: Path) -> Path:
    """Fetches an allowed URL into the store, under its own file name; blocks.

    Raises:
        ModelNotFound: A redirect leads where ``allowed_urls`` does not, or the URL names no file.
        ModelFileExists: The store has a file of that name.
        DownloadFailed: Anything that went wrong on the way; the reason is logged.
        ServerStopping: The limits say that nobody waits any more.
    """
    url, part = source.url, store / f".{uuid.uuid4().hex}.part"
    try:
        target = store / _file_name(url)
        _refuse_existing(target)
        with part.open("xb") as file:
            _unless_cancelled(lambda: _transfer(source, file, store), source.limits)
        _publish(part, target)
    except (_Broken, OSError, http.client.HTTPException, ValueError) as error:
        reason = str(error) or type(error).__name__
        logger.warning("Download of %s failed: %s", one_line(url), one_line(reason))
        raise DownloadFailed(f"Failed to download archive from: {url}") from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()
    return target


def _unless_cancelled(work: Callable[[], None], limits: ArchiveLimits) -> None:
    """Does something in a thread, and leaves it alone when nobody waits any more."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - passed on to the one who waits
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="download", daemon=True).start()
    while not concurrent.futures.wait([done], _LOOK_UP_SECONDS).done:
        limits.check_cancelled()
    done.result()


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


def _transfer(source: Source, file: IO[bytes], directory: Path) -> None:
    limits = source.limits
    deadline = time.monotonic() + limits.download_seconds
    with _opened(source) as (stream, expected):
        received = _copy(stream, file, directory, deadline, limits)
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
def _opened(
    source: Source,
) -> Iterator[tuple[io.BufferedReader | http.client.HTTPResponse, int | None]]:
    """The bytes behind a URL, and how many there should be where that is known."""
    if urlsplit(source.url).scheme == "file":
        path = _local_path(source.url)
        with path.open("rb") as file:
            yield file, path.stat().st_size
    else:
        with _open_http(source) as response:
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


def _open_http(source: Source) -> http.client.HTTPResponse:
    try:
        response = _opener(source.allowed_urls).open(
            _request(source), timeout=source.limits.stall_seconds
        )
    except urllib.error.HTTPError as error:
        with error:
            raise _Broken(_reason(error)) from error
    assert isinstance(response, http.client.HTTPResponse)
    if response.status != http.client.OK:
        response.close()
        raise _Broken(f"status {response.status}")
    return response


def _request(source: Source) -> urllib.request.Request:
    if not source.is_signed and urlsplit(source.url).scheme != "s3":
        return urllib.request.Request(source.url)  # noqa: S310 - allowed_urls has been asked
    signed = signed_request(source.url)
    request = urllib.request.Request(signed.url)  # noqa: S310 - as above
    for name, value in signed.headers.items():
        request.add_unredirected_header(name.capitalize(), value)
    return request


def _reason(error: urllib.error.HTTPError) -> str:
    """The status, and what S3 says besides."""
    reason, body = str(error), error.fp
    assert isinstance(body, http.client.HTTPResponse)
    if code := _S3_ERROR_CODE.search(body.read1(_ERROR_BYTES)):
        reason += f", {code[1].decode()}"
    if region := error.headers.get("x-amz-bucket-region"):
        reason += f"; the bucket lies in {region}"
    return reason


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
