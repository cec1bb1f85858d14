"""Start, stop and feed a server from Python: what TorchServe offers as ``ts.launcher``.

Every call runs the command line in a process of its own, so nothing of the server is loaded here.
Which addresses it listens at is read from the configuration file that was named; without one from
``config.properties``, and without that they are TorchServe's, http://127.0.0.1:8080 and :8081. Only
plain http is spoken.
"""

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

#: Of each listener: where it is when nothing is said, and the port when none is said.
_DEFAULTS = {
    "inference_address": ("http://127.0.0.1:8080", 80),
    "management_address": ("http://127.0.0.1:8081", 8081),
}
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - to be asked there, not bound
# Unpacking large models comes before the listeners open.
_START_SECONDS = 600.0
# A registration waits for the workers; the server's own deadlines come first.
_REGISTER_SECONDS = 1800.0
_LOOK_SECONDS = 0.1
# Between the end of a server and its last line here.
_LAST_WORDS_SECONDS = 5.0
_KEPT_LINES = 1000


class LauncherError(RuntimeError):
    """The server did not do what it was asked for; the text says what it said."""


@dataclass(frozen=True)
class Answer:
    """What the management listener answered."""

    status_code: int
    text: str

    def json(self) -> Any:
        """The body as a JSON value."""
        return json.loads(self.text)


_config_file: str | None = None
_reader: threading.Thread | None = None  # of the server that was started last


def start(
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | Iterable[str] | None = None,
    enable_model_api: bool = False,
) -> "queue.Queue[str | None]":
    """Starts a server in the background and returns when it answers.

    A server that runs already is stopped before. What the new one writes to its console is printed,
    for as long as this process lives; the server itself lives on.

    Args:
        model_store: Directory with the model archives.
        snapshot_file: A configuration file, which a snapshot is too.
        no_config_snapshots: Whether snapshots are neither written nor restored.
        plugin_folder: For TorchServe's scripts; Java plugins have no effect.
        disable_token: Whether requests go without a token.
        models: What to load, one or several: ``all``, ``FILE.mar``, ``NAME=FILE.mar`` or a URL.
        enable_model_api: Whether models may be registered over HTTP.

    Returns:
        The lines of the server's console, and None at its end. Of those that nobody takes, the
        first 1000 are kept.

    Raises:
        LauncherError: It did not start; its output tells why.
    """
    global _config_file, _reader
    _config_file = snapshot_file
    host, port = _address("inference_address")
    if _pid_file().exists():
        stop()
    flags = {
        "--model-store": model_store,
        "--ts-config": snapshot_file,
        "--plugins-path": plugin_folder,
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
        "--models": [models] if isinstance(models, str) else models and list(models),
    }
    command = _command("--start", *_arguments(flags), stdout=subprocess.PIPE)
    lines: queue.Queue[str | None] = queue.Queue(_KEPT_LINES)
    _reader = threading.Thread(target=_pass_on, args=(command.stdout, lines), daemon=True)
    _reader.start()
    if command.wait() != 0:
        _reader.join(_LAST_WORDS_SECONDS)
        raise LauncherError("The server was not started; its output tells why.")
    _wait_until_open(host, port)
    return lines


def stop(wait: float | bool = True) -> None:
    """Stops the server.

    Args:
        wait: Whether to wait for its end, or for how many seconds at most.

    Raises:
        LauncherError: It has not ended by then.
    """
    command = _command("--stop")
    if wait is False:
        return
    try:
        status = command.wait(None if wait is True else wait)
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"The server has not ended within {wait} s.") from error
    if status != 0:
        raise LauncherError("The server was not stopped; the output tells why.")
    if _reader is not None:
        _reader.join(_LAST_WORDS_SECONDS)


def register_model(model_name: str, url: str) -> Answer:
    """Registers a model with one worker and waits for it.

    Args:
        model_name: Under which name.
        url: A file in the model store, or where to fetch the archive.
    """
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": 1, "synchronous": "true"}
    )


def register_model_with_params(params: Mapping[str, Any]) -> Answer:
    """Registers a model.

    Args:
        params: The query of ``POST /models``.

    Raises:
        OSError: No server answers.
    """
    host, port = _address("management_address")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/models"
    request = urllib.request.Request(  # noqa: S310 - the address of our own server
        f"{url}?{urllib.parse.urlencode(params)}", method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=_REGISTER_SECONDS) as answer:  # noqa: S310
            return Answer(answer.status, answer.read().decode())
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Answer(refusal.code, refusal.read().decode())


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    arguments: list[str] = []
    for flag, value in flags.items():
        if value:
            arguments.append(flag)
        if isinstance(value, str):
            arguments.append(value)
        elif isinstance(value, list):
            arguments.extend(value)
    return arguments


def _pass_on(output: IO[bytes], lines: "queue.Queue[str | None]") -> None:
    with output:
        for line in output:
            text = line.decode(errors="replace").rstrip()
            sys.stdout.write(f"{text}\n")  # in one piece: others print, too
            sys.stdout.flush()
            _keep(lines, text)
    _keep(lines, None)


def _keep(lines: "queue.Queue[str | None]", line: str | None) -> None:
    if line is None and lines.full():  # whoever reads must meet the end
        lines.get_nowait()
    with contextlib.suppress(queue.Full):
        lines.put_nowait(line)


def _command(*arguments: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    # As a module: the console script need not be on the path. Its folder of modules is not the
    # working directory's, where a model author's logging.py may lie (-P, new in Python 3.11).
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe_path, "-m", "marserve.frontend", *arguments]
    return subprocess.Popen(  # noqa: S603 - our own interpreter, the caller's own flags
        command, stdout=stdout, stderr=stdout and subprocess.STDOUT
    )


def _wait_until_open(host: str, port: int) -> None:
    """Waits for the inference listener: it is the last one that opens."""
    deadline = time.monotonic() + _START_SECONDS
    while not _is_open(host, port):
        if not _pid_file().exists():
            raise LauncherError("The server ended while it started; its output tells why.")
        if time.monotonic() > deadline:
            raise LauncherError(f"The server does not answer after {_START_SECONDS:g} s.")
        time.sleep(_LOOK_SECONDS)


def _pid_file() -> Path:
    return Path(tempfile.gettempdir()) / ".model_server.pid"


def _is_open(host: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((host, port), timeout=_LOOK_SECONDS).close()
        return True
    return False


def _address(key: str) -> tuple[str, int]:
    """Host and port of a listener, as the configuration file says."""
    text, implied_port = _DEFAULTS[key]
    path = Path(os.environ.get("TS_CONFIG_FILE") or _config_file or "config.properties")
    with contextlib.suppress(FileNotFoundError):
        # One line each, and no escapes but those of Java's own writer.
        lines = re.findall(rf"^\s*{key}\s*[=:\s]\s*(\S+)", path.read_text(), re.MULTILINE)
        text = lines[-1].replace("\\", "") if lines else text
    address = urllib.parse.urlsplit(text)
    if address.scheme != "http" or not address.hostname:
        raise LauncherError(f"{key}={text} in {path}: the launcher speaks plain http only.")
    return _EVERYWHERE.get(address.hostname, address.hostname), address.port or implied_port
