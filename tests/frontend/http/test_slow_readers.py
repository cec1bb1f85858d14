"""How much of an answer a client has taken."""

import asyncio
import socket
import ssl
from typing import Any

import pytest
import uvloop
from certificates import make_authority

from marserve.frontend.http.slow_readers import bytes_read


class UncountedSocket(socket.socket):
    """As in sandboxes whose kernel fills in little of what is known of a connection."""

    def getsockopt(self, *_: Any) -> Any:
        return bytes(256)


@pytest.mark.parametrize("kind", [socket.socket, UncountedSocket])
def test_what_a_client_takes_is_seen_in_every_sandbox(kind):
    async def test():
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            client.connect(server.getsockname())
            client.sendall(b"a request")
            accepted, _ = server.accept()
            connection = kind(fileno=accepted.detach())
            connection.setblocking(False)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=connection)
            transport.write(bytes(10_000_000))
            before, taken = bytes_read(transport), 0
            client.setblocking(False)
            while taken < 5_000_000:
                taken += len(await loop.sock_recv(client, 1 << 16))
            assert 0 < bytes_read(transport) - before <= 10_000_000
            transport.abort()

    asyncio.run(test())


class Server(asyncio.Protocol):
    """Has one client."""

    def __init__(self) -> None:
        self.has_client = asyncio.Event()
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport
        self.has_client.set()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.is_lost = True


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_client_that_leaves_a_tls_connection_may_be_looked_at(tmp_path, run):
    """The connection is lost one turn of the loop before its protocol knows."""
    authority = make_authority(tmp_path)
    served, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    served.load_cert_chain(authority.file("chain.pem"), authority.file("key.pem"))
    trusting.load_verify_locations(authority.root)

    async def test():
        server = Server()
        listener = await asyncio.get_running_loop().create_server(
            lambda: server, "127.0.0.1", 0, ssl=served
        )
        place = listener.sockets[0].getsockname()
        _, writer = await asyncio.open_connection(*place, ssl=trusting)
        await server.has_client.wait()
        writer.transport.abort()
        while not server.is_lost:
            bytes_read(server.transport)
            await asyncio.sleep(0)
        listener.close()

    run(test())
