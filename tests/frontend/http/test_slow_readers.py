"""How much of an answer a client has taken."""

import asyncio
import socket
from typing import Any

import pytest

from marserve.frontend.http.slow_readers import bytes_taken


class UncountedSocket(socket.socket):
    """As in sandboxes whose kernel fills in little of what is known of a connection."""

    def getsockopt(self, *_: Any) -> Any:
        return bytes(256)


@pytest.mark.parametrize("kind", [socket.socket, UncountedSocket])
def test_what_a_client_takes_is_seen_in_every_sandbox(kind: type[socket.socket]) -> None:
    async def test() -> None:
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
            before, taken = bytes_taken(transport), 0
            client.setblocking(False)
            while taken < 5_000_000:
                taken += len(await loop.sock_recv(client, 1 << 16))
            assert 0 < bytes_taken(transport) - before <= 10_000_000
            transport.abort()

    asyncio.run(test())
