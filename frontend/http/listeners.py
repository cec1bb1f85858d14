"""Listeners on the network or in the file system, and how they are bound.

A socket file without a server is replaced; one where a server listens is not, and any other file is
never changed. The umask decides its permissions, as in TorchServe: who may write may connect.
"""

import asyncio
import errno
import os
import socket
import ssl
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from marserve.frontend.aio.background import BackgroundTasks
from marserve.frontend.configuration.addresses import Address, UnixAddress
from marserve.frontend.http.http_server import HttpServer
from marserve.frontend.http.protocol import Connection
from marserve.frontend.http.router import Route

_BACKLOG = 1024
_PROBE_SECONDS = 1.0


@dataclass(frozen=True)
class Listener:
    """An address where clients connect, and what is served there."""

    name: str  # what it serves, for the operator
    address: Address | UnixAddress
    routes: Mapping[str, Route]  # by first path segment
    when_ready: bool = False  # whether clients are admitted only when every model is READY


@dataclass(frozen=True)
class BoundListener:
    """A listener that is bound; clients cannot connect before `listen`.

    Models may take minutes to unpack, so ports are bound before. Port 0 of the address is replaced
    by the port that the system chose.
    """

    name: str
    server: asyncio.AbstractServer
    address: Address | UnixAddress
    when_ready: bool  # as that of `Listener`
    stop: Callable[[], object]  # called when it admits no more clients

    async def listen(self, opened: AsyncExitStack) -> None:
        """Admit clients until ``opened`` is closed, or raise OSError if another program does."""
        opened.callback(self.stop)
        opened.callback(self.server.close)
        with _naming(self.address):
            await self.server.start_serving()


@dataclass(eq=False)
class TlsHandshake(asyncio.Protocol):
    """Admits a client before the TLS handshake; event loops report it only after the handshake.

    Otherwise clients that never end a handshake would not be limited, and could use all file
    descriptors. A refused client is disconnected: a handshake for a 503 would cost too much.
    """

    clients: HttpServer
    tls: ssl.SSLContext
    handshakes: BackgroundTasks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, on a duplicate: uvloop reads before ``start_tls`` could pause it."""
        connection, raw = self.clients(), transport.get_extra_info("socket")
        with suppress(OSError):  # no descriptor is left
            sock = socket.fromfd(raw.fileno(), raw.family, raw.type)
            if connection.admit(transport, sock):
                self.handshakes.start(self._run(connection, sock))
            else:
                sock.close()
        cast("asyncio.Transport", transport).abort()

    async def _run(self, connection: Connection, sock: socket.socket) -> None:
        before, seconds = connection.transport, connection.limits.head_timeout
        try:
            with suppress(OSError):  # of TLS, too
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: connection, sock, ssl=self.tls, ssl_handshake_timeout=seconds
                )
        finally:
            if connection.transport is before:
                connection.connection_lost(None)


async def bind_listener(
    opened: AsyncExitStack,
    listener: Listener,
    clients: Callable[[], asyncio.Protocol],
    stop: Callable[[], object],
) -> BoundListener:
    """Bind a listener until ``opened`` is closed; OSError if the address cannot be used."""
    loop, address = asyncio.get_running_loop(), listener.address
    with _naming(address):
        if isinstance(address, UnixAddress):
            bound = _bind(address.path)
            opened.callback(_remove, address.path, _identity(address.path))
            server = await loop.create_unix_server(
                clients, sock=bound, backlog=_BACKLOG, start_serving=False
            )
        elif address.host == "::":
            server = await loop.create_server(
                clients, sock=_bind_any(address.port), backlog=_BACKLOG, start_serving=False
            )
            address = replace(address, port=server.sockets[0].getsockname()[1])
        else:
            server = await loop.create_server(
                clients, address.host, address.port, backlog=_BACKLOG, start_serving=False
            )
            address = replace(address, port=server.sockets[0].getsockname()[1])
    opened.callback(server.close)
    return BoundListener(listener.name, server, address, listener.when_ready, stop)


@contextmanager
def _naming(address: Address | UnixAddress) -> Iterator[None]:
    """Add the address and the system's reason to errors."""
    try:
        yield
    except OSError as error:
        # asyncio replaces the system's message by its own; a failed lookup has no errno.
        number = 0 if isinstance(error, socket.gaierror) else error.errno or 0
        reason = os.strerror(number) if number else error.strerror or str(error)
        taken = "; another program listens there" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"Cannot listen at {address.url}: {reason}{taken}") from error


def _bind_any(port: int) -> socket.socket:
    """Bind all addresses of both versions of IP, or of 6 only if net.ipv6.bindv6only says so.

    Event loops bind those of version 6 only.
    """
    bound = socket.socket(socket.AF_INET6)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("::", port))
    except OSError:
        bound.close()
        raise
    return bound


def _bind(path: Path) -> socket.socket:
    _remove_dead(path)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound


def _remove_dead(path: Path) -> None:
    """Remove a socket file where no server listens."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return  # probably it does not exist; else binding fails
    if not stat.S_ISSOCK(mode):
        raise OSError("the file is not a socket")
    if _answers(path):
        raise OSError("another server listens there")
    path.unlink(missing_ok=True)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True  # busy, or without permission: a server listens
    return True


def _identity(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _remove(path: Path, identity: tuple[int, int]) -> None:
    """Remove our socket file, unless another server has replaced it."""
    with suppress(OSError):
        if _identity(path) == identity:
            path.unlink()
