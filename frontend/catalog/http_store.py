"""A catalog at a URL of a web server, of S3, or of a server with S3's protocol.

The revision is the ETag. Reads are conditional (``If-None-Match``), and so are writes
(``If-Match``), so that one of two simultaneous writers gets an error. S3 supports that since 2024,
and so does MinIO; few web servers do, so that writing to one must be configured.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus

import aiohttp

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.archives.http_client import failure_of, http_client, reason_of, send
from marserve.frontend.archives.s3 import Signer
from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.store import Document, StoreConflict, StoreFailed
from marserve.frontend.errors import ServeError
from marserve.frontend.logs.formats import one_line

_READ_BYTES = 1 << 16
# S3 answers 409 to one of two simultaneous conditional writes, otherwise 412.
_CONFLICTS = (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED)


class HttpStore:
    """A catalog at an ``http``, ``https`` or ``s3`` URL, whose server may be silent for a time.

    ``may_write`` allows writing to a web server.
    """

    def __init__(self, url: str, timeout: float, *, may_write: bool) -> None:
        self._url = url
        self._is_s3 = url.startswith("s3://")
        self._timeout = timeout
        self._may_write = may_write
        self._signer = Signer()
        self.place = one_line(url)

    async def why_read_only(self) -> str:
        """Return a reason for a web server that is not configured for writing."""
        if self._may_write or self._is_s3:
            return ""
        return "model_catalog_mode=read-write is not set, and few web servers take PUT requests"

    async def read(self, known: str = "") -> Document | None:
        """Send a conditional GET request."""
        headers = {"If-None-Match": known} if known else {}
        async with self._answer("GET", headers) as response:
            if response.status == HTTPStatus.NOT_MODIFIED and known:
                return None
            if response.status != HTTPStatus.OK:
                raise StoreFailed(await reason_of(response))
            text = await _whole(response)
            revision = response.headers.get("etag", "")
        if not revision:
            raise StoreFailed("the server gives no ETag, by which a new catalog would be known")
        return Document(text, revision)

    async def write(self, text: bytes, revision: str) -> str:
        """Send a conditional PUT request."""
        if revision.startswith("W/"):
            raise StoreFailed("the server's ETag is a weak one, which no write can refer to")
        headers = {"If-Match": revision, "Content-Type": "application/json"}
        async with self._answer("PUT", headers, text) as response:
            if response.status in _CONFLICTS:
                raise StoreConflict
            if response.status not in (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.NO_CONTENT):
                raise StoreFailed(await reason_of(response))
            return response.headers.get("etag", "")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, headers: Mapping[str, str], body: bytes = b""
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        url = self._url
        try:
            if self._is_s3:  # in a thread: botocore may send a request for credentials
                url, headers = await in_abandonable_thread(
                    self._signer.sign, url, method, body, headers
                )
            async with (
                http_client(self._timeout, read_bytes=_READ_BYTES) as client,
                send(client, method, url, headers, body or None) as response,
            ):
                yield response
        except ServeError as error:
            raise StoreFailed(error.message.replace(self._url, self.place)) from error
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise StoreFailed(failure_of(error)) from error


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """Read a body; raises StoreFailed if it is longer than a catalog may be."""
    pieces, length = [], 0
    async for piece in response.content.iter_chunked(_READ_BYTES):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_BYTES:
            raise StoreFailed(f"it is longer than {MAX_BYTES} bytes")
    return b"".join(pieces)
