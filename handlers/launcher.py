"""Start, stop and feed a server from Python: what TorchServe offers as ``ts.launcher``.

Every call runs the command line in a process of its own, so nothing of the server is loaded here.
Which addresses it listens at is read from the configuration file that was named; without one from
``config.properties``, and without that they are TorchServe's, http://127.0.0.1:8080 and :8081. Only
plain http is spoken.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def start(
    model_store: str | None = None,
    snapshot_file: str | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | None = None,
    disable_token: bool = False,
    models: str | Iterable[str] | None = None,
    enable_model_api: bool = False,
) -> None:
    """Starts a server in the background and returns when it answers.

    Args:
        model_store: Directory with the model archives.
        snapshot_file: A configuration file, which a snapshot is too.
        no_config_snapshots: Whether snapshots are neither written nor restored.
        plugin_folder: For TorchServe's scripts; Java plugins have no effect.
        disable_token: Whether requests go without a token.
        models: What to load, one or several: ``all``, ``FILE.mar``, ``NAME=FILE.mar`` or a URL.
        enable_model_api: Whether models may be registered over HTTP.

    Raises:
        LauncherError: It did not start; its output tells why.
    """
    global _config_file
    _config_file = snapshot_file
    host, port = _address("inference_address")
    flags = {
        "--model-store": model_store,
        "--ts-config": snapshot_file,
        "--plugins-path": plugin_folder,
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
        "--models": [models] if isinstance(models, str) else models and list(models),
    }
    if _command("--start", *_arguments(flags)).wait() != 0:
        raise LauncherError("The server was not started; its output tells why.")
    _wait_until_open(host, port)


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


def _command(*arguments: str) -> "subprocess.Popen[bytes]":
    # As a module: the console script need not be on the path. Its folder of modules is not the
    # working directory's, where a model author's logging.py may lie (-P, new in Python 3.11).
    safe_path = ["-P"] if sys.version_info >= (3, 11) else []
    command = [sys.executable, *safe_path, "-m", "marserve.frontend", *arguments]
    return subprocess.Popen(command)  # noqa: S603 - our own interpreter, the caller's own flags


def _wait_until_open(host: str, port: int) -> None:
    """Waits for the inference listener: it is the last one that opens."""
    pid_file = Path(tempfile.gettempdir()) / ".model_server.pid"
    deadline = time.monotonic() + _START_SECONDS
    while not _is_open(host, port):
        if not pid_file.exists():
            raise LauncherError("The server ended while it started; its output tells why.")
        if time.monotonic() > deadline:
            raise LauncherError(f"The server does not answer after {_START_SECONDS:g} s.")
        time.sleep(_LOOK_SECONDS)


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
