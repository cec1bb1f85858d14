"""Who is at the other end of a connection."""

import asyncio
import socket
import struct
from typing import Any

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def peer_host(transport: asyncio.BaseTransport) -> str:
    """The address at the other end, without its port; empty behind a unix socket."""
    name: Any = transport.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) else ""


def peer_name(transport: asyncio.BaseTransport) -> str:
    """Who is at the other end: ``host:port``, or process and user behind a unix socket."""
    name: Any = transport.get_extra_info("peername")
    if isinstance(name, tuple):
        return f"{name[0]}:{name[1]}"
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return ""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(packed)
    return f"unix:pid={pid},uid={uid}"
