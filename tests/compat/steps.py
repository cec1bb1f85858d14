"""What is asked of a server: the vocabulary in which `questions.py` is written."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import wire
from wire import Answer

JSON = "application/json"
TEXT = "text/plain"
FORM = "application/x-www-form-urlencoded"
OCTETS = "application/octet-stream"


class Peer(Protocol):
    """A server that is asked."""

    def ask(self, listener: str, *pieces: bytes, method: str, patience: float) -> Answer:
        """Send the bytes of a request."""

    def fill_in(self, text: str) -> str:
        """Replace names like {inference_key} by what they are for this server."""

    def wait_ready(self, model: str, count: int) -> None:
        """Wait until a model has so many READY workers."""


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        line: Method and target.
        note: What is special about it; part of its name.
        to: The listener.
        kind: Its content type.
        body: None for a request without one.
        headers: More headers.
        raw: The whole request, in pieces, instead of all that; see `wire.ask`.
        patience: Seconds to wait for the answer.
    """

    line: str
    note: str = ""
    to: str = "inference"
    kind: str = ""
    body: bytes | str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    raw: Sequence[bytes] = ()
    patience: float = wire.PATIENCE

    @property
    def name(self) -> str:
        """As it is called in the table."""
        note = f" ({self.note})" if self.note else ""
        return f"{self.to}: {self.line}{note}"

    def run(self, peer: Peer) -> Iterator[tuple[str, Answer]]:
        """Ask, and yield the name and the answer."""
        yield self.name, self.answer(peer)

    def answer(self, peer: Peer) -> Answer:
        """Ask."""
        method, _, target = self.line.partition(" ")
        pieces = self.raw or [self._request(peer, method, target)]
        return peer.ask(self.to, *pieces, method=method, patience=self.patience)

    def _request(self, peer: Peer, method: str, target: str) -> bytes:
        headers = {name: peer.fill_in(value) for name, value in self.headers.items()}
        if self.kind:
            headers["Content-Type"] = self.kind
        body = self.body.encode() if isinstance(self.body, str) else self.body
        if body is None and method in ("POST", "PUT"):
            body = b""
        return wire.request(method, peer.fill_in(target), headers, body)


@dataclass(frozen=True)
class Together:
    """Several requests at the same time."""

    name: str
    asks: Sequence[Ask]

    def run(self, peer: Peer) -> Iterator[tuple[str, Answer]]:
        """Ask all, and yield names and answers in the order of the requests."""
        with ThreadPoolExecutor(len(self.asks)) as threads:
            answers = list(threads.map(lambda ask: ask.answer(peer), self.asks))
        for number, answer in enumerate(answers):
            yield f"{self.name} [{number}]", answer


@dataclass(frozen=True)
class Ready:
    """Wait until a model has so many workers that are READY."""

    model: str
    count: int = 1
    name: str = ""

    def run(self, peer: Peer) -> Iterator[tuple[str, Answer]]:
        """Wait; there is nothing to compare."""
        peer.wait_ready(self.model, self.count)
        yield from ()


Step = Ask | Together | Ready


@dataclass(frozen=True)
class Setting:
    """One configuration, and everything that is asked under it.

    Attributes:
        name: As it is called in the table.
        properties: Keys of config.properties.
        steps: In their order.
        environment: More environment variables.
        shared_port: Whether inference and management have the same address.
    """

    name: str
    properties: dict[str, str]
    steps: Sequence[Step]
    environment: dict[str, str] = field(default_factory=dict)
    shared_port: bool = False


def manage(line: str, note: str = "", **more: object) -> Ask:
    """A request to the management listener."""
    return Ask(line, note, to="management", **more)


def predict(model: str, body: bytes | str | None = b"x", kind: str = OCTETS, note: str = "") -> Ask:
    """A prediction."""
    return Ask(
        f"POST /predictions/{model}", note or kind or "no content type", "inference", kind, body
    )


def order(model: str, json: str, note: str = "", patience: float = wire.PATIENCE) -> Ask:
    """An order to one of the handlers that do what a JSON object says."""
    line = f"POST /predictions/{model}"
    return Ask(line, note or json, kind=JSON, body=json, patience=patience)


def register(query: str, note: str = "") -> Ask:
    """A registration by query."""
    return manage(f"POST /models?{query}", note)


def install(name: str, query: str = "") -> Ask:
    """Register an archive of the store with one worker."""
    return register(f"url={name}.mar&initial_workers=1{query and '&' + query}")
