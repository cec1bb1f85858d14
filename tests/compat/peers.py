"""The two servers, started alike and asked alike."""

import contextlib
import http.server
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import wire
from steps import Setting
from wire import Answer

sys.path.insert(0, str(Path(__file__).parents[1]))
from servers import Server, free_ports, is_open

START_SECONDS = 120.0


class NotStarted(Exception):
    """The server ended, or did not open its listeners in time; what it printed."""


class Contestant:
    """A server of either kind under a setting; see `steps.Peer`.

    Args:
        program: The command line that starts it.
        archives: Folder whose contents become its model store.
        setting: What to configure.
        files: URL where the archives can be downloaded.
    """

    def __init__(self, program: Path, archives: Path, setting: Setting, files: str) -> None:
        # A short name: sockets lie below it, and a path to a socket has an end.
        self.directory = Path(tempfile.mkdtemp(prefix="cmp"))
        self.files = files
        properties = {"default_response_timeout": "60", **setting.properties}
        for kind, port in zip(("inference", "management"), free_ports(2), strict=True):
            properties[f"grpc_{kind}_port"] = str(port)
        self.server = Server(self.directory, setting.environment, properties, program)
        shutil.copytree(archives, self.server.store, dirs_exist_ok=True)
        if setting.shared_port:
            port = self.server.ports["management"] = self.server.ports["inference"]
            self.server.write_property("management_address", f"http://127.0.0.1:{port}")

    def start(self) -> None:
        """Start, and wait until every listener is open."""
        self.server.launch("--ts-config", "config.properties")
        deadline = time.monotonic() + START_SECONDS
        while not all(map(is_open, self.server.ports.values())):
            if not self.server.is_running or time.monotonic() > deadline:
                raise NotStarted(self.server.console_text()[-2000:])
            time.sleep(0.05)

    def close(self) -> None:
        """Kill whatever it started, and remove its directory."""
        self.server.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def ask(self, listener: str, *pieces: bytes, method: str, patience: float) -> Answer:
        """Send the bytes of a request."""
        port = self.server.ports[listener]
        return wire.ask(port, *pieces, method=method, patience=patience)

    def fill_in(self, text: str) -> str:
        """Replace {files}, {store} and the names of keys."""
        if "{" not in text:
            return text
        names = {"files": self.files, "store": str(self.server.store)}
        for key in ("inference", "management", "API"):
            if f"{{{key}_key}}" in text:
                names[f"{key}_key"] = self._keys()[key]["key"]
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", value)
        return text

    def _keys(self) -> Any:
        return json.loads((self.directory / "key_file.json").read_text())

    def wait_ready(self, model: str, count: int) -> None:
        """Wait until a model has so many READY workers; who gives up says so and goes on."""
        deadline = time.monotonic() + 40
        while self._ready(model) != count:
            if time.monotonic() > deadline:
                print(f"{self.server.program}: {model} has not {count} ready workers")
                return
            time.sleep(0.1)

    def _ready(self, model: str) -> int:
        headers = {}
        if (self.directory / "key_file.json").exists():
            headers["Authorization"] = self.fill_in("Bearer {management_key}")
        request = wire.request("GET", f"/models/{model}", headers)
        answer = self.ask("management", request, method="GET", patience=5)
        if answer.status != 200:
            return -1
        (described,) = json.loads(answer.body)
        return [worker["status"] for worker in described["workers"]].count("READY")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: Any) -> None:
        """Downloads are nobody's news."""


@contextlib.contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """Serve the files of a folder by HTTP; its URL."""
    handler = partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
