"""The HTTP client for archives and catalogs.

It looks names up in daemon threads, uses the proxies of the environment, keeps no cookies and
decodes no content encoding.
"""

import re
import socket
import urllib.request
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.logs.formats import excerpt

_S3_ERROR_CODE = re.compile(rb"<Code>(\w+)</Code>")


def http_client(stall: float, *, read_bytes: int) -> aiohttp.ClientSession:
    """Return a client that fails when the peer is silent for ``stall`` seconds."""
    return aiohttp.ClientSession(
        headers={"Accept-Encoding": "identity", "User-Agent": "marserve"},
        connector=aiohttp.TCPConnector(resolver=_Resolver(), force_close=True),
        timeout=aiohttp.ClientTimeout(
            total=None, connect=stall, sock_connect=stall, sock_read=stall
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=read_bytes,
    )


def get(
    client: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a GET request; redirects are not followed."""
    return client.get(_url(url), headers=headers, allow_redirects=False, proxy=_proxy(url))


class _Resolver(AbstractResolver):
    """Looks names up in daemon threads.

    asyncio and uvloop wait for their lookups when the loop is closed, up to half a minute.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await in_abandonable_thread(
            socket.getaddrinfo, host, port, family, socket.SOCK_STREAM
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, protocol, _, address in found
        ]

    async def close(self) -> None:
        pass


def _url(text: str) -> URL:
    """Parse a URL and keep its quoting, on which signatures depend."""
    if not text.isprintable():
        raise ValueError("a URL with unprintable characters")
    return URL(text, encoded=text.isascii() and " " not in text)


def _proxy(url: str) -> str | None:
    """Return the proxy of the environment; aiohttp's trust_env also sends passwords of ~/.netrc."""
    parts = urlsplit(url)
    if parts.hostname is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


async def reason_of(response: aiohttp.ClientResponse) -> str:
    """Return the status of a failed response, with S3's error code and region."""
    reason = excerpt(f"HTTP Error {response.status}: {response.reason}")
    if code := _S3_ERROR_CODE.search(await response.content.read(4096)):
        reason += f", {code[1].decode()}"
    if region := response.headers.get("x-amz-bucket-region"):
        reason += f"; the bucket is in {excerpt(region)}"
    return reason


def failure_of(error: Exception) -> str:
    """Return why a request failed, without its URL and its answer, which may contain secrets."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"no usable answer ({type(error.__cause__ or error).__name__} {error.status})"
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "the URL is malformed"
    if isinstance(error, OSError) and error.filename:
        return str(error.strerror)  # without the path
    return excerpt(error) or type(error).__name__
