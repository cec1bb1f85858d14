"""A container without Docker: the layout of the image, in namespaces made by bubblewrap.

Its process is number 1, its user may nothing, its root is read-only but for some tmpfs, and its
network is its own: so the image's ports are free, and nothing can be fetched. What pip installed is
the running environment, seen below /home/venv. Environment and ENTRYPOINT are read from the
Dockerfile; `test_image.py` builds that.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import program
from servers import PATIENCE, wait_for

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
HOME = "/home/model-server"
NAMESPACES = "--unshare-pid --as-pid-1 --unshare-net --unshare-ipc --unshare-uts --new-session"
_USERS = f"root:x:0:0::/root:/bin/sh\nmodel-server:x:1000:1000::{HOME}:/bin/bash\n"
# Asks from inside: the status and body of an answer, or 0 and why there is none.
_ASK = """
import http.client, json, sys
try:
    connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=20)
    headers = {"content-type": "application/json"}
    connection.request(sys.argv[2], sys.argv[3], sys.stdin.buffer.read(), headers)
    answer = connection.getresponse()
    print(json.dumps([answer.status, answer.read().decode()]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


@lru_cache(maxsize=1)
def instructions() -> list[tuple[str, str]]:
    """The instructions of the last stage of the Dockerfile."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    found = re.findall(r"^([A-Z]+)\s+(.*)$", joined, re.MULTILINE)
    last = max(at for at, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


def image_environment() -> dict[str, str]:
    """ENV of the image."""
    words = [w for name, text in instructions() if name == "ENV" for w in shlex.split(text)]
    return dict(word.split("=", 1) for word in words)


def image_words(instruction: str) -> list[str]:
    """ENTRYPOINT or CMD of the image."""
    (words,) = (json.loads(text) for name, text in instructions() if name == instruction)
    return list(words)


def _parents(path: Path) -> list[str]:
    """Has bubblewrap make the directories above, which it would make for root alone."""
    return [w for each in reversed(path.parents) for w in ("--perms", "0755", "--dir", str(each))]


@lru_cache(maxsize=1)
def why_not() -> str:
    """Why there can be no containers here; empty where they can."""
    if os.geteuid():
        return "only root can run them as another user and enter them"
    words = [program("bwrap"), *shlex.split(NAMESPACES), "--ro-bind", "/", "/", "--proc", "/proc"]
    return subprocess.run([*words, "true"], capture_output=True, text=True, timeout=30).stderr


class Container:
    """One that may be run.

    Args:
        directory: An empty directory for what it shares with the test, its /shared.
    """

    def __init__(self, directory: Path) -> None:
        if reason := why_not():
            pytest.skip(f"no containers: {reason}")
        self.store = directory / "model-store"
        self.shared = directory / "shared"
        self.console = directory / "console.txt"
        for made in (self.store, self.shared):
            made.mkdir()
        self.shared.chmod(0o777)
        self.files: dict[str, str] = {"/etc/passwd": _USERS}
        self.mounts: dict[Path, Path] = {}  # what is seen besides, and where; all read-only
        self.writable = ["/tmp", f"{HOME}/tmp", f"{HOME}/logs"]
        self.user = 1000
        self.workdir = HOME
        self.process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        *command: str,
        entrypoint: Sequence[str] | None = None,
        **environment: str,
    ) -> None:
        """Run a command, and do not wait; by default with the ENTRYPOINT of the image."""
        entrypoint = image_words("ENTRYPOINT") if entrypoint is None else entrypoint
        variables = image_environment() | environment
        words = [program("bwrap"), *shlex.split(NAMESPACES), "--die-with-parent", "--clearenv"]
        for name, value in variables.items():
            words += ["--setenv", name, value]
        with contextlib.ExitStack() as opened:
            console = opened.enter_context(self.console.open("ab"))
            descriptors = []
            for path, text in self.files.items():
                read, write = os.pipe()
                opened.callback(os.close, read)
                with open(write, "w") as file:  # noqa: PTH123 - a descriptor is no path
                    file.write(text)
                descriptors.append(read)
                words += ["--perms", "0755", "--file", str(read), path]
            words += [*self._tree(), "--chdir", self.workdir, *self._as_user()]
            self.process = subprocess.Popen(
                [*words, *entrypoint, *command],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
            )

    def _tree(self) -> list[str]:
        words = ["--proc", "/proc", "--dev", "/dev"]
        for name in ("bin", "sbin", "lib", "lib64"):
            if Path(f"/{name}").is_symlink():
                words += ["--symlink", f"usr/{name}", f"/{name}"]
        # First: what is installed may lie below /tmp.
        for name in self.writable:
            words += [*_parents(Path(name)), "--perms", "1777", "--tmpfs", name]
        for source, target in self._shown():
            if source.exists():
                words += [*_parents(target), "--ro-bind", str(source), str(target)]
        for name in ("wf-store", "tmp", "logs"):
            words += ["--perms", "0755", "--dir", f"{HOME}/{name}"]
        return [*words, "--bind", str(self.shared), "/shared", "--remount-ro", "/"]

    def _shown(self) -> Iterator[tuple[Path, Path]]:
        """What is seen of the host, and where."""
        parts = [Path("/usr"), Path("/usr/local"), Path("/usr/local/bin"), Path("/usr/local/lib")]
        # Piece by piece where the image has files of its own.
        host = [path for part in parts for path in sorted(part.iterdir()) if path not in parts]
        host += [Path("/etc/ld.so.cache"), Path("/etc/alternatives")]
        # The interpreter, what is installed, and our sources.
        host += [Path(place) for place in (sys.base_prefix, *sys.path, sys.prefix) if place]
        host += [ROOT / name for name in ("backend", "frontend", "handlers", "tools")]
        for path in dict.fromkeys(host):
            # Not the root of the sources, which only its owner may be able to enter.
            if path not in (*parts, ROOT):
                yield path, path
        yield Path(sys.prefix), Path("/home/venv")
        yield DOCKER / "dockerd-entrypoint.sh", Path("/usr/local/bin/dockerd-entrypoint.sh")
        yield DOCKER / "bash-env.sh", Path("/usr/local/lib/marserve/bash-env.sh")
        yield DOCKER / "config.properties", Path(HOME) / "config.properties"
        yield self.store, Path(HOME) / "model-store"
        yield from self.mounts.items()

    def _as_user(self) -> list[str]:
        names = [f"--reuid={self.user}", "--regid=0", "--clear-groups", "--no-new-privs"]
        return ["--", program("setpriv"), *names, "--bounding-set=-all", "--inh-caps=-all"]

    # Life

    @property
    def first(self) -> psutil.Process:
        """Its process number 1."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        first: psutil.Process = wait_for(
            lambda: next(iter(parent.children()), None), what=self.text
        )
        return first

    def processes(self) -> dict[str, psutil.Process]:
        """All of its processes but the first, by their command lines; not those that have ended."""
        found = {}
        for process in self.first.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as such, too
                found[" ".join(process.cmdline())] = process
        return found

    def find(self, *words: str) -> psutil.Process | None:
        """A process with these words in its command line."""
        found = (each for line, each in self.processes().items() if all(w in line for w in words))
        return next(found, None)

    def send(self, number: int = signal.SIGTERM) -> None:
        """What ``docker kill`` or ``docker stop`` sends."""
        self.first.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait for its end; returns the exit status."""
        assert self.process is not None
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.processes().keys()}\n{self.text()}") from None

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process is not None and self.process.poll() is None:
            # Its first process, too, whose end is that of all: --die-with-parent is forgotten where
            # setpriv changes the user.
            first = psutil.Process(self.process.pid).children()
            for process in (*first, self.process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    def text(self) -> str:
        """What it has printed."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    # Requests and commands

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """What ``docker exec`` does, with the environment of the image."""
        user = ["--setuid", str(self.user), "--setgid", "0"]
        return subprocess.run(
            [*self._enter("--all", "--wd", *user), *command],
            env=image_environment(),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def _enter(self, *options: str) -> list[str]:
        return [program("nsenter"), "--target", str(self.first.pid), *options]

    def ask(self, method: str, path: str, body: str = "", port: int = 8080) -> tuple[int, Any]:
        """A request from inside: status and text, or 0 where nobody answers."""
        arguments = (str(port), method, path)
        done = self.run_beside(sys.executable, "-IS", "-c", _ASK, *arguments, text=body)
        assert done.stdout, done.stderr
        status, text = json.loads(done.stdout)
        return status, text

    def run_beside(self, *command: str, text: str = "") -> "subprocess.CompletedProcess[str]":
        """Run a program of ours in the network of the container."""
        # Of its namespaces only the network's: its end does not end this.
        return subprocess.run(
            [*self._enter("--net"), *command],
            input=text,
            capture_output=True,
            text=True,
            timeout=6 * PATIENCE,
        )

    def wait_ready(self) -> None:
        """Wait until all models answer."""
        wait_for(self._is_ready, what=self.text)

    def _is_ready(self) -> bool:
        assert self.is_running, self.text()
        return self.ask("GET", "/ready")[0] == 200
