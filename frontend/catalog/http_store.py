"""A catalog at a URL of a web server, of S3, or of a server with S3's protocol.

The revision is the ETag; reads are conditional (``If-None-Match``).
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus

import aiohttp

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.archives.http_client import failure_of, get, http_client, reason_of
from marserve.frontend.archives.s3 import Signer
from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.store import Document, StoreFailed
from marserve.frontend.errors import ServeError
from marserve.frontend.logs.formats import one_line

_READ_BYTES = 1 << 16


class HttpStore:
    """A catalog at an ``http``, ``https`` or ``s3`` URL, whose server may be silent for a time."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._signer = Signer()
        self.place = one_line(url)

    async def read(self, known: str = "") -> Document | None:
        """Send a conditional GET request."""
        headers = {"If-None-Match": known} if known else {}
        async with self._answer(headers) as response:
            if response.status == HTTPStatus.NOT_MODIFIED and known:
                return None
            if response.status != HTTPStatus.OK:
                raise StoreFailed(await reason_of(response))
            text = await _whole(response)
            revision = response.headers.get("etag", "")
        if not revision:
            raise StoreFailed("the server gives no ETag, by which a new catalog would be known")
        return Document(text, revision)

    @contextlib.asynccontextmanager
    async def _answer(self, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        url = self._url
        try:
            if url.startswith("s3://"):  # in a thread: botocore may send a request for credentials
                url, headers = await in_abandonable_thread(self._signer.sign, url, headers)
            async with (
                http_client(self._timeout, read_bytes=_READ_BYTES) as client,
                get(client, url, headers) as response,
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
