"""Listeners: which there are, and how each gets its place on the network or in the file system.

Equal addresses share a listener, whatever they speak. On a listener that serves inference and
management /metrics is served too, as in TorchServe, beside the listener that is meant for it.

A socket file that a dead server left behind is replaced; one where somebody answers is not, and
what is no socket is never touched. Its permissions are those the umask leaves, as TorchServe's: who
may write to it may connect.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from marserve.frontend.configuration.addresses import Address, UnixAddress
from marserve.frontend.http.router import Route

logger = logging.getLogger(__name__)

_BACKLOG = 1024
_PROBE_SECONDS = 1.0
_MAX_DESCRIPTORS = 1 << 20


@dataclass(frozen=True)
class Listener:
    """One place where clients connect.

    Attributes:
        name: What it serves, for the operator.
        address: Where.
        routes: By first path segment.
    """

    name: str
    address: Address | UnixAddress
    routes: Mapping[str, Route]


def share_addresses(
    listeners: Iterable[Listener], join: Callable[[Listener, Listener], Mapping[str, Route]]
) -> list[Listener]:
    """Makes one listener of those with equal addresses, in the order in which they are given.

    Args:
        listeners: One for each address that is configured.
        join: The routes of two in one.
    """
    shared: list[Listener] = []
    for listener in listeners:
        found = [i for i, other in enumerate(shared) if _is_same_place(other, listener)]
        if found:
            first = shared[found[0]]
            name = f"{first.name} and {listener.name}"
            shared[found[0]] = replace(first, name=name, routes=join(first, listener))
        else:
            shared.append(listener)
    return shared


def _is_same_place(first: Listener, second: Listener) -> bool:
    return first.address == second.address and first.address.is_fixed


class BoundListener:
    """A listener that has its place; nobody can connect before `listen`.

    Models may take minutes to unpack, and whether a port is free should be known before.

    Args:
        server: What has been bound.
        address: Where, with the port that the system chose if that was left to it.
    """

    def __init__(self, server: asyncio.AbstractServer, address: Address | UnixAddress) -> None:
        self._server = server
        self.address = address

    async def listen(self, opened: AsyncExitStack) -> None:
        """Let clients in, until ``opened`` is closed.

        Raises:
            OSError: Another program came first.
        """
        opened.callback(self._server.close)
        with _naming(self.address):
            await self._server.start_serving()


async def bind_listener(
    opened: AsyncExitStack,
    address: Address | UnixAddress,
    clients: Callable[[], asyncio.Protocol],
    *,
    tls: ssl.SSLContext | None,
    handshake_timeout: float,
) -> BoundListener:
    """Takes a place for a listener.

    Args:
        opened: Where the end of it is noted.
        address: Where to listen.
        clients: Makes a protocol of every connection.
        tls: For https addresses.
        handshake_timeout: Seconds a client may take until TLS is agreed on.

    Raises:
        OSError: The place is taken, or is not for us.
    """
    loop = asyncio.get_running_loop()
    if isinstance(address, UnixAddress):
        bound = _bind(address.path)
        opened.callback(_remove, address.path, _identity(address.path))
        unix_server = await loop.create_unix_server(
            clients, sock=bound, backlog=_BACKLOG, start_serving=False
        )
        opened.callback(unix_server.close)
        return BoundListener(unix_server, address)
    is_secure = address.scheme == "https"
    with _naming(address):
        server = await loop.create_server(
            clients,
            address.host,
            address.port,
            backlog=_BACKLOG,
            ssl=tls if is_secure else None,
            ssl_handshake_timeout=handshake_timeout if is_secure else None,
            start_serving=False,
        )
    opened.callback(server.close)
    return BoundListener(server, replace(address, port=server.sockets[0].getsockname()[1]))


@contextmanager
def _naming(address: Address | UnixAddress) -> Iterator[None]:
    """Say in errors which address they are about, and what is wrong in the words of the system."""
    try:
        yield
    except OSError as error:
        # asyncio puts a sentence of its own in the place of the system's; the numbers of a lookup
        # that failed are not the system's.
        number = 0 if isinstance(error, socket.gaierror) else error.errno or 0
        reason = os.strerror(number) if number else error.strerror
        taken = "; another program listens there" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"Cannot listen at {address.url}: {reason}{taken}") from error


def raise_descriptor_limit() -> None:
    """Takes as many file descriptors as the system lets us have; each connection costs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(ValueError, OSError):  # then it stays as it is
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _bind(path: Path) -> socket.socket:
    _clear(path)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise OSError(f"Cannot listen at unix:{path}: {error.strerror}") from error
    return bound


def _clear(path: Path) -> None:
    """Removes a socket file where nobody listens any more."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # nothing there; if that is not it, binding will tell
    if not stat.S_ISSOCK(mode):
        raise OSError(f"Cannot listen at unix:{path}: the file is no socket")
    if _answers(path):
        raise OSError(f"Cannot listen at unix:{path}: another server listens there")
    path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # busy, or not for us: somebody's all the same
    return True


def _identity(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _remove(path: Path, identity: tuple[int, int]) -> None:
    """Removes our socket file, unless it is another's by now."""
    with suppress(OSError):
        if _identity(path) == identity:
            path.unlink()
