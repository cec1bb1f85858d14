"""A catalog behind a URL: of a web server, or of S3 and what speaks its protocol.

The revision is the ETag. A look asks for the catalog only if it has another one; a write says which
one it replaces (``If-Match``), so that of two writers one is told of the other. S3 has that since
2024, and so have its kin, such as MinIO; a web server has to offer it, so that writing there is off
unless it is asked for. Redirects are not followed: the operator has named this place.

One URL is one object, which S3 replaces as a whole. What its clients may read and write is for the
bucket's policy to say; that they may not is told in S3's words.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus

import aiohttp

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.archives.http_client import (
    HEADERS,
    failure_of,
    http_client,
    proxy_of,
    reason_of,
    url_of,
)
from marserve.frontend.archives.s3 import Signer
from marserve.frontend.catalog.document import MAX_BYTES
from marserve.frontend.catalog.store import Document, StoreConflict, StoreFailed
from marserve.frontend.errors import ServeError
from marserve.frontend.logs.formats import one_line

_READ_BYTES = 1 << 16
# S3 says 409 where two conditional writes meet, else 412 as HTTP does.
_CONFLICTS = (HTTPStatus.CONFLICT, HTTPStatus.PRECONDITION_FAILED)
_WRITTEN = (HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.NO_CONTENT)


class HttpStore:
    """A catalog behind an ``http``, ``https`` or ``s3`` URL.

    The server may be silent for ``timeout`` seconds. ``may_write``: the configuration demands it.
    """

    def __init__(self, url: str, timeout: float, *, may_write: bool) -> None:
        self._url = url
        self._is_s3 = url.startswith("s3://")
        self._timeout = timeout
        self._may_write = may_write
        self._signer = Signer()
        self.place = one_line(url)

    async def why_read_only(self) -> str:
        """See `CatalogStore`."""
        if self._may_write or self._is_s3:
            return ""
        return "model_catalog_mode=read-write is not set, and few web servers take PUT requests"

    async def read(self, known: str = "") -> Document | None:
        """See `CatalogStore`."""
        headers = {"If-None-Match": known} if known else {}
        async with self._answer("GET", b"", headers) as response:
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
        """See `CatalogStore`."""
        if revision.startswith("W/"):
            raise StoreFailed("the server's ETag is a weak one, which no write can refer to")
        headers = {"If-Match": revision, "Content-Type": "application/json"}
        async with self._answer("PUT", text, headers) as response:
            if response.status in _CONFLICTS:
                raise StoreConflict
            if response.status not in _WRITTEN:
                raise StoreFailed(await reason_of(response))
            return response.headers.get("etag", "")

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            async with (
                http_client(self._timeout, read_bytes=_READ_BYTES) as client,
                await self._request(client, method, body, headers) as response,
            ):
                yield response
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise StoreFailed(failure_of(error)) from error

    async def _request(
        self, client: aiohttp.ClientSession, method: str, body: bytes, headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        url, sent = self._url, {**HEADERS, **headers}
        if self._is_s3:
            try:  # botocore may ask the machine for its role, which can take its time
                url, signature = await in_abandonable_thread(
                    self._signer.sign, url, method, body, headers
                )
            except ServeError as error:
                raise StoreFailed(error.message.replace(self._url, self.place)) from error
            sent |= signature
        return await client.request(
            method,
            url_of(url),
            data=body or None,
            headers=sent,
            allow_redirects=False,
            proxy=proxy_of(url),
        )


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """A body, of which no more is kept than a catalog may have."""
    pieces, length = [], 0
    async for piece in response.content.iter_chunked(_READ_BYTES):
        pieces.append(piece)
        length += len(piece)
        if length > MAX_BYTES:
            raise StoreFailed(f"it is longer than {MAX_BYTES} bytes")
    return b"".join(pieces)
