"""One request, and what can be wrong with it before anybody answers."""

import socket
import threading
import tracemalloc

import pytest

from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.destination import Destination


@pytest.fixture
def url():
    """Of somebody who takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("key", "path"), [("sec\nret", "/"), ("secr\u20act", "/"), ("secret", "/a b"), ("secret", "/ä")]
)
def test_what_cannot_be_written_is_told_without_the_key(url, key, path):
    client = Client(Destination(url), {"Authorization": f"Bearer {key}"})
    with pytest.raises(
        BenchError, match=r"cannot be written: .* a character that HTTP does not allow"
    ) as caught:
        client.ask("GET", path)
    assert not isinstance(caught.value, ServerUnreachable), "that would pass for an answer"
    assert "sec" not in str(caught.value)


def test_small_chunks_take_little_memory():
    count = 50_000
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def answer():
        with listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(head + b"2\r\nab\r\n" * count + b"0\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client(Destination(f"http://127.0.0.1:{listener.getsockname()[1]}"))
        thread = threading.Thread(target=answer)
        thread.start()
        tracemalloc.start()
        try:
            body = client.ask("GET", "/").body
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            thread.join()
    assert body == b"ab" * count
    assert peak < 20 * count
