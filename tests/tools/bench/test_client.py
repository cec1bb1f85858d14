"""One request, and what can be wrong with it before anybody answers."""

import socket
from collections.abc import Iterator

import pytest

from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError, ServerUnreachable
from marserve.tools.bench.generator.destination import Destination


@pytest.fixture
def url() -> Iterator[str]:
    """Of somebody who takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("key", "path"), [("sec\nret", "/"), ("secr\u20act", "/"), ("secret", "/a b"), ("secret", "/ä")]
)
def test_what_cannot_be_written_is_told_without_the_key(url: str, key: str, path: str) -> None:
    client = Client(Destination(url), {"Authorization": f"Bearer {key}"})
    with pytest.raises(BenchError, match="cannot be written") as caught:
        client.ask("GET", path)
    assert not isinstance(caught.value, ServerUnreachable), "that would pass for an answer"
    assert "sec" not in str(caught.value)
