"""A container as SageMaker starts it, without Docker: Amazon's toolkit, and our ``torchserve``.

Bubblewrap makes a root of throw-aways around the directories of this machine: what the toolkit
writes to ``/etc`` and ``/.sagemaker`` goes with the container, ``/opt/ml`` is a directory of the
test. The command ``serve`` is the toolkit's own, unchanged, and the first process.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import requests
from environments import environment
from programs import program
from servers import PATIENCE, free_ports, wait_for

_ROOT = Path(__file__).parents[1]
#: What pip installs, without what it asks for, and what it needs of that.
TOOLKIT = "sagemaker-pytorch-inference==2.0.25"
_NEEDED = ("boto3", "retrying", "six", "setuptools<81")  # newer ones lack its pkg_resources
#: By what the toolkit finds the server.
SERVER_CLASS = "org.pytorch.serve.ModelServer"


def toolkit_python() -> Path:
    """Python of an environment with the toolkit, and with marserve in TorchServe's place."""
    python = environment(
        "sagemaker",
        ["--no-deps", TOOLKIT],
        _NEEDED,
        ["--no-deps", "--editable", str(_ROOT)],
    )
    # torch, numpy and what marserve depends on are those of the tests.
    (packages,) = python.parents[1].glob("lib/python3*/site-packages")
    shared = (place for place in sys.path if place.endswith("site-packages"))
    (packages / "of-the-tests.pth").write_text("\n".join(shared))
    return python


class Container:
    """One that may be started; its directory ``ml`` is what it has as /opt/ml."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.ml = directory / "ml"
        self.ml.mkdir()
        self.console = directory / "console.txt"
        (self.port,) = free_ports(1)
        self.variables = variables
        self.process: subprocess.Popen[bytes] | None = None
        self._temp = directory / "t"
        self._temp.mkdir()

    def start(self, *command: str) -> None:
        """Run a command, by default ``serve``, and do not wait."""
        binaries = toolkit_python().parent
        inherited = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        variables = {
            **inherited,
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "TMPDIR": str(self._temp),
            "TEMP": str(self._temp),
            "SAGEMAKER_BIND_TO_PORT": str(self.port),
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **self.variables,
        }
        with self.console.open("ab") as console:
            self.process = subprocess.Popen(
                [*self._box(), *(command or ["serve"])],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
            )

    def _box(self) -> Iterator[str]:
        yield from (program("bwrap"), "--unshare-pid", "--as-pid-1", "--die-with-parent")
        replaced = {Path(name) for name in ("/dev", "/etc", "/lost+found", "/opt", "/proc")}
        yield from _shown(Path("/"), replaced)
        yield from ("--dev", "/dev", "--proc", "/proc", "--dir", "/etc", "--dir", "/opt")
        yield from _shown(Path("/etc"))
        yield from _shown(Path("/opt"), {Path("/opt/ml")})
        yield from ("--bind", str(self.ml), "/opt/ml", "--chdir", "/")

    # Life

    @property
    def first(self) -> psutil.Process:
        """Its process number 1, the toolkit."""
        assert self.process is not None
        box = psutil.Process(self.process.pid)
        first: psutil.Process = wait_for(lambda: next(iter(box.children()), None), what=self.text)
        return first

    def servers(self) -> list[psutil.Process]:
        """Those of its processes that the toolkit takes for the server."""
        return [each for each in self.processes() if SERVER_CLASS in each.cmdline()]

    def processes(self) -> list[psutil.Process]:
        """All of its processes but the first."""
        return self.first.children(recursive=True)

    def wait_ready(self) -> None:
        """Wait until it is healthy and all models answer."""
        wait_for(self._is_ready, 4 * PATIENCE, what=self.text)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.text()
        try:
            return self.ask("GET", "/ready").status_code == 200
        except requests.ConnectionError:
            time.sleep(0.1)  # or else the log is full of it
            return False

    def stop(self) -> int:
        """Stop it as SageMaker does, which kills it after 30 s; returns the exit status."""
        self.first.send_signal(signal.SIGTERM)
        assert self.process is not None
        return self.process.wait(30)

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        """What it has printed."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    # Requests

    def ask(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        """A request of SageMaker's."""
        url = f"http://127.0.0.1:{self.port}{path}"
        return requests.request(method, url, **{"timeout": 2 * PATIENCE, **kwargs})

    def load(self, model: str) -> requests.Response:
        """Have a model of `add_model` loaded."""
        body = {"model_name": model, "url": f"/opt/ml/models/{model}/model"}
        return self.ask("POST", "/models", json=body)

    def invoke(self, model: str, body: Any = b"", **headers: str) -> requests.Response:
        """Invoke a model of many."""
        headers = {"X-Amzn-SageMaker-Target-Model": f"{model}.tar.gz", **headers}
        return self.ask("POST", f"/models/{model}/invoke", data=body, headers=headers)

    def add_model(self, name: str, code: str, weights: int = 0) -> None:
        """Unpack a model of many, as SageMaker does before it has it loaded."""
        folder = self.ml / "models" / name / "model"
        (folder / "code").mkdir(parents=True)
        (folder / "code" / "inference.py").write_text(code)
        with (folder / "weights.bin").open("wb") as file:
            file.truncate(weights)


def _shown(folder: Path, replaced: frozenset[Path] | set[Path] = frozenset()) -> Iterator[str]:
    """What a directory holds, each by itself: so other things can be put between."""
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            yield from ("--symlink", str(entry.readlink()), str(entry))
        elif entry not in replaced:
            yield from ("--dev-bind", str(entry), str(entry))
