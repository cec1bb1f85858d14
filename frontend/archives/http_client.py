"""The HTTP client with which the server fetches what it serves.

Names are looked up in threads that nobody waits for, proxies are those of the environment, no
cookie is kept, and nothing is decoded: a file is taken as it lies there.
"""

import re
import socket
import urllib.request
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from marserve.frontend.aio.background import in_abandonable_thread
from marserve.frontend.logs.formats import excerpt

_ERROR_BYTES = 4096
_S3_ERROR_CODE = re.compile(rb"<Code>(\w+)</Code>")
#: Of every request; also where a server could send a file compressed, it shall not.
HEADERS = {"Accept-Encoding": "identity", "User-Agent": "marserve"}


def http_client(stall: float, *, read_bytes: int) -> aiohttp.ClientSession:
    """A client that gives up on a peer silent for ``stall`` seconds, and decodes nothing."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(resolver=_Resolver(), force_close=True),
        timeout=aiohttp.ClientTimeout(
            total=None, connect=stall, sock_connect=stall, sock_read=stall
        ),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        read_bufsize=read_bytes,
    )


class _Resolver(AbstractResolver):
    """Looks names up without anybody waiting for a name server that does not answer.

    Those of asyncio and uvloop are waited for when the loop is closed, half a minute if need be.
    """

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Called by aiohttp."""
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
        """Called by aiohttp."""


def url_of(text: str) -> URL:
    """A URL as it is spelt, where it is spelt by the rules: signatures and tokens depend on it.

    Raises:
        ValueError: It is none.
    """
    if not text.isprintable():
        raise ValueError("a URL with characters that are none")
    return URL(text, encoded=text.isascii() and " " not in text)


def proxy_of(url: str) -> str | None:
    """The proxy of the environment; aiohttp's own way would also send passwords of ~/.netrc."""
    parts = urlsplit(url)
    if parts.hostname is None or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


async def reason_of(response: aiohttp.ClientResponse) -> str:
    """The status, with S3's error code and region."""
    reason = excerpt(f"HTTP Error {response.status}: {response.reason}")
    if code := _S3_ERROR_CODE.search(await response.content.read(_ERROR_BYTES)):
        reason += f", {code[1].decode()}"
    if region := response.headers.get("x-amz-bucket-region"):
        reason += f"; the bucket lies in {excerpt(region)}"
    return reason


def failure_of(error: Exception) -> str:
    """Why a request failed, without its URL and what came for an answer: they may have secrets."""
    if isinstance(error, aiohttp.ClientResponseError):
        return f"no usable answer ({type(error.__cause__ or error).__name__} {error.status})"
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return "the URL is malformed"
    return excerpt(error) or type(error).__name__
