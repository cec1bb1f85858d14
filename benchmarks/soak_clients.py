"""Clients that do not simply get their answer: refused ones, those that leave, those with an id."""

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Sent(NamedTuple):
    """A request, and whether its client waits for the answer."""

    raw: bytes
    waits: bool


Requests = Callable[[str], Iterator[Sent]]
"""From the path of a model to requests without end."""


def _errors(path: str) -> Iterator[Sent]:
    """400, 404 and 503 in turn."""
    bad_form = _request(path, b"a=%zz", "Content-Type: application/x-www-form-urlencoded")
    refused = (bad_form, _request(f"{path}-unknown"), _request(path, b"raise"))
    return (Sent(raw, waits=True) for raw in itertools.cycle(refused))


def _leaving(path: str) -> Iterator[Sent]:
    return itertools.repeat(Sent(_request(path), waits=False))


def _with_ids(path: str) -> Iterator[Sent]:
    numbers = itertools.count()
    return (Sent(_request(path, b"x", f"X-Request-Id: id-{n:x}"), waits=True) for n in numbers)


KINDS: dict[str, Requests] = {
    "errors (400, 404, 503)": _errors,
    "clients that leave": _leaving,
    "X-Request-Id given": _with_ids,
}


async def send(port: int, path: str, requests: Requests, count: int, clients: int) -> None:
    """Send so many requests over so many connections; nobody looks at the status."""
    waiting = itertools.islice(requests(path), count)
    await asyncio.gather(*(_client(port, waiting) for _ in range(clients)))


async def _client(port: int, waiting: Iterator[Sent]) -> None:
    connection = None
    for raw, waits in waiting:
        connection = connection or await asyncio.open_connection("127.0.0.1", port)
        reader, writer = connection
        writer.write(raw)
        if not waits or await _is_closed_after_answer(reader):
            writer.close()
            connection = None
    if connection is not None:
        connection[1].close()


async def _is_closed_after_answer(reader: asyncio.StreamReader) -> bool:
    """Read an answer; whether the server closes the connection behind it, as it does on errors."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, _, rest = head.partition(b"content-length: ")
    await reader.readexactly(int(rest.partition(b"\r\n")[0]))
    return b"connection: close" in head


def _request(path: str, body: bytes = b"x", header: str = "Accept: */*") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: soak\r\n{header}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body
