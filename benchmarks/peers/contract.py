"""What an adapter is, and what it is given: the whole of what a new peer has to know.

An adapter is a file in ``adapters/`` with a `Peer` named ``PEER``. Its ``set_up`` writes the peer's
application and configuration into a directory of its own and says how the peer is started and
asked. Everything else (environments, start, readiness, freezing, stopping, load, tables) is the
same for all.
"""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_SHARED_MODELS = Path(__file__).with_name("models.py")
RAW = "application/octet-stream"


@dataclass(frozen=True)
class Setting:
    """What a server is started with.

    Attributes:
        model: The name of one of the shared models, see `models`.
        body_bytes: Length of what clients post, ASCII letters.
        batch_size: Most requests in a batch.
        window_ms: How long a request may wait for company.
        policy: The batching policy, for those who have a choice.
    """

    model: str
    body_bytes: int
    batch_size: int
    window_ms: int
    policy: str = "fixed"


PORTS = 5  # as many as the neediest peer has listeners


@dataclass(frozen=True)
class Site:
    """Where a peer lives while it runs.

    Attributes:
        directory: Its own, with ``models.py`` in it.
        ports: `PORTS` free ones on loopback; the first is asked for predictions.
        python: The interpreter of the environment that the peer is installed in.
    """

    directory: Path
    ports: Sequence[int]
    python: Path

    @classmethod
    def prepare(cls, directory: Path, ports: Sequence[int], python: Path) -> "Site":
        """Put the shared models into an empty directory."""
        shutil.copy(_SHARED_MODELS, directory)
        return cls(directory, ports, python)

    def program(self, name: str) -> str:
        """A console script of the environment."""
        return str(self.python.with_name(name))

    def write(self, name: str, text: str) -> str:
        """Write a file; returns its path."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)


def _as_it_is(body: bytes) -> bytes:
    return body


@dataclass(frozen=True)
class Service:
    """How a peer that was set up is started and asked.

    Attributes:
        command: Runs in the foreground, in the site's directory.
        path: Where predictions are posted.
        environment: Added to that of the benchmark.
        content_type: Of the requests.
        encode: The request's body for what a client wants to send; raw where the peer can.
        decode: What the client wanted to have, from the answer's body.
    """

    command: Sequence[str]
    path: str
    environment: Mapping[str, str] = field(default_factory=dict)
    content_type: str = RAW
    encode: Callable[[bytes], bytes] = _as_it_is
    decode: Callable[[bytes], bytes] = _as_it_is


@dataclass(frozen=True)
class Peer:
    """A server that is compared.

    Attributes:
        name: As its makers write it.
        set_up: Writes what it needs into the site; returns how to start and ask it.
        requirements: For pip, the distribution whose version is shown first; nothing where the
            benchmark's own environment has it.
        models: Those it can serve.
        note: What a reader of the numbers must know: how the contract was met, what it cannot do.
    """

    name: str
    set_up: Callable[[Site, Setting], Service]
    requirements: tuple[str, ...] = ()
    models: frozenset[str] = frozenset({"echo", "length", "cnn"})
    note: str = ""

    @property
    def distribution(self) -> str:
        """The distribution whose version is the peer's."""
        name = self.requirements[0] if self.requirements else self.name
        return name.partition("[")[0].partition("=")[0]


OWN_PYTHON = Path(sys.executable)
