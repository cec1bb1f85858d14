"""A server with every archive of the comparison in its store, and a way to ask it to the byte."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import wire
from archives import pack_all
from servers import TORCHSERVE, Server

Ask = Callable[..., wire.Answer]


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all of them."""
    folder = tmp_path_factory.mktemp("compat") / "archives"
    pack_all(TORCHSERVE.with_name("torch-model-archiver"), folder)
    return folder


@pytest.fixture(scope="session")
def start_compat_server(prepare_server: Any, archives: Path) -> Callable[..., Any]:
    """`start_server` with the archives in the store and TorchServe's open settings."""
    open_settings = {"enable_model_api": "true", "disable_token_authorization": "true"}

    @contextlib.contextmanager
    def start(**properties: str) -> Iterator[Server]:
        with prepare_server(**{**open_settings, **properties}) as server:
            shutil.copytree(archives, server.store, dirs_exist_ok=True)
            server.start()
            yield server
            server.stop()

    return start


@pytest.fixture(scope="session")
def server(start_compat_server: Callable[..., Any]) -> Iterator[Server]:
    """One server for all these tests; with models that need no more than a moment to load."""
    with start_compat_server(default_response_timeout="60") as shared:
        for name in ("probe", "lab", "results", "stream", "describing"):
            answer = shared.register(f"{name}.mar", initial_workers=1)
            assert answer.status_code == 200, answer.text
        yield shared


@pytest.fixture(scope="session")
def ask_of() -> Callable[[Server], Ask]:
    """Make the function that asks a server."""

    def asker(server: Server) -> Ask:
        def ask(
            line: str,
            body: bytes | str | None = None,
            kind: str = "",
            *,
            to: str = "inference",
            headers: dict[str, str] | None = None,
        ) -> wire.Answer:
            method, _, target = line.partition(" ")
            sent = body.encode() if isinstance(body, str) else body
            if sent is None and method in ("POST", "PUT"):
                sent = b""
            content_type = {"Content-Type": kind} if kind else {}
            request = wire.request(method, target, {**content_type, **(headers or {})}, sent)
            return wire.ask(server.ports[to], request, method=method)

        return ask

    return asker


@pytest.fixture(scope="session")
def ask(ask_of: Callable[[Server], Ask], server: Server) -> Ask:
    """Ask the shared server: ``ask("POST /predictions/probe", b"x", "text/plain")``."""
    return ask_of(server)
