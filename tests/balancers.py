"""Three real servers behind a real HAProxy or a real nginx, and clients that keep them busy.

The balancers run the very files of ``deploy/``; what differs is their variables.
"""

import contextlib
import csv
import itertools
import os
import re
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import requests
from servers import PATIENCE, wait_for

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
# Or clients would take the processors from servers that start.
_THINKING_SECONDS = 0.01
SEQUENCE = "ts_request_sequence_id"


@dataclass
class Balancer:
    """One that runs; ``url`` is where clients ask."""

    name: str
    url: str
    grpc_ports: Mapping[str, int]
    stats_port: int

    @property
    def http_port(self) -> int:
        """Where clients ask."""
        return int(self.url.rpartition(":")[2])

    def predict(self, model: str, **options: Any) -> requests.Response:
        """A prediction over a connection of its own."""
        return requests.post(f"{self.url}/predictions/{model}", timeout=PATIENCE, **options)

    def states(self, backend: str = "") -> dict[str, str]:
        """What HAProxy thinks of the servers of a backend, or of all backends."""
        text = requests.get(f"http://127.0.0.1:{self.stats_port}/;csv", timeout=PATIENCE).text
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {
            row["svname"] if backend else f"{row['pxname']}/{row['svname']}": row["status"]
            for row in rows
            if row["svname"].startswith("r") and backend in ("", row["pxname"])
        }


@contextlib.contextmanager
def haproxy(
    program: str, folder: Path, variables: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run HAProxy with the file of ``deploy/`` as it is."""
    listen = {
        name: f"127.0.0.1:{value}" if name.startswith("LISTEN") else value
        for name, value in variables.items()
    }
    command = [program, "-f", str(DEPLOY / "haproxy" / "haproxy.cfg"), "-db"]
    with _running(command, folder, {**os.environ, **listen}) as process:
        yield process


@contextlib.contextmanager
def nginx(
    program: str, folder: Path, variables: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run nginx with the template of ``deploy/``, filled in as envsubst would."""
    template = (DEPLOY / "nginx" / "nginx.conf.template").read_text()
    text = re.sub(r"\$\{(\w+)\}", lambda match: variables[match[1]], template)
    file = folder / "nginx.conf"
    file.write_text(text)
    places = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
    temporary = "".join(f"{each}_temp_path {folder}/{each};" for each in places)
    where = f"daemon off; user root; pid {folder}/pid; error_log {folder}/error.log;"
    # nginx knows no other way to say where a server without root keeps its files.
    file.write_text(text.replace("http {", f"http {{ {temporary}", 1))
    command = [program, "-p", str(folder), "-c", str(file), "-g", where]
    with _running(command, folder, dict(os.environ)) as process:
        yield process


@contextlib.contextmanager
def _running(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> Iterator["subprocess.Popen[bytes]"]:
    with (folder / "console.txt").open("wb") as console:
        process = subprocess.Popen(command, env=environment, stdout=console, stderr=console)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)


@dataclass
class Load:
    """Clients that ask one after the other, until they are stopped.

    Attributes:
        statuses: How often each status was seen; a broken connection has none, and counts as 0.
        answers: What each request was answered, by its id.
        orders: What requests ask for beside their id.
        orders: What requests ask for beside their id.
    """

    balancer: Balancer
    model: str
    clients: int = 6
    statuses: Counter[int] = field(default_factory=Counter)
    answers: dict[int, list[Any]] = field(default_factory=dict)
    orders: Mapping[str, Any] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count, init=False)
    _stopped: threading.Event = field(default_factory=threading.Event, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __enter__(self) -> Self:
        self._threads = [threading.Thread(target=self._ask) for _ in range(self.clients)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)

    def wait_answered(self, count: int) -> None:
        """Until this many more requests were answered."""
        enough = len(self.answers) + count
        wait_for(lambda: len(self.answers) >= enough, what=lambda: self.statuses)

    def served_by(self, since: int = 0) -> Counter[str]:
        """How many requests, from a number on, each replica has answered."""
        with self._lock:
            return Counter(
                answer.get("replica", "")
                for number, (answer, *_) in self.answers.items()
                if number >= since and isinstance(answer, dict)
            )

    def is_served_by(self, replica: str, since: int) -> bool:
        """Whether a replica has answered a request from this number on."""
        return replica in self.served_by(since)

    @property
    def answered(self) -> int:
        """How many were answered."""
        return len(self.answers)

    def _ask(self) -> None:
        with requests.Session() as session:
            url = f"{self.balancer.url}/predictions/{self.model}"
            while not self._stopped.wait(_THINKING_SECONDS):
                with self._lock:
                    number = next(self._numbers)
                try:
                    response = session.post(
                        url, json={**self.orders, "id": number}, timeout=PATIENCE
                    )
                    status, answer = response.status_code, _document(response)
                except requests.RequestException as error:
                    status, answer = 0, repr(error)
                with self._lock:
                    self.statuses[status] += 1
                    self.answers.setdefault(number, []).append(answer)


def _document(response: requests.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return response.text
