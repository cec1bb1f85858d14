"""Start, stop and feed a server from Python: TorchServe's ``ts.launcher``.

Every call runs the command line in a separate process; of the server's code this process loads
only the readers of the configuration file and of the pid file. The addresses come from the given
configuration file, by default ``config.properties``, and have the server's defaults. Only plain
http is supported.
"""

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlencode, urlsplit

from marserve.frontend.configuration.addresses import Address
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.config_file import find_config_file
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError
from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import ServerUnreachable
from marserve.tools.bench.generator.destination import Destination

# Large models are unpacked before the listeners open.
_START_SECONDS = 600.0
# A registration waits for the workers; the server's deadlines expire earlier.
_REGISTER_SECONDS = 1800.0
_LOOK_SECONDS = 0.1
# Between the end of a server and the last line of its output.
_LAST_WORDS_SECONDS = 5.0
_KEPT_LINES = 1000


class LauncherError(RuntimeError):
    """The server did not start or stop."""


@dataclass(frozen=True)
class Answer:
    """A response of the management listener."""

    status_code: int
    text: str

    def json(self) -> Any:
        """Return the body as a JSON value."""
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
    """Start a server in the background and return when it answers.

    A running server is stopped first. This process prints the console output of the new server.
    The server continues to run after this process ends.

    Args:
        model_store: Directory with the model archives.
        snapshot_file: A configuration file or a snapshot.
        no_config_snapshots: Whether snapshots are neither written nor restored.
        plugin_folder: Accepted for TorchServe's scripts; Java plugins have no effect.
        disable_token: Whether requests need no token.
        models: One or several models: ``all``, ``FILE.mar``, ``NAME=FILE.mar`` or a URL.
        enable_model_api: Whether clients may register models over HTTP.

    Returns:
        The lines of the server's console, and None at its end. The queue keeps up to 1000 lines;
        further lines are dropped.

    Raises:
        LauncherError: The server did not start; its output contains the reason.
    """
    global _config_file, _reader
    _config_file = snapshot_file
    address = _address("inference_address")
    if _running_pid() is not None:
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
        raise LauncherError("The server did not start; its output contains the reason.")
    _wait_until_open(address)
    return lines


def stop(wait: float | bool = True) -> None:
    """Stop the server.

    Args:
        wait: Whether to wait for its end, or the limit in seconds.

    Raises:
        LauncherError: The server was not stopped, or not within the limit.
    """
    command = _command("--stop")
    if wait is False:
        return
    try:
        status = command.wait(None if wait is True else wait)
    except subprocess.TimeoutExpired as error:
        raise LauncherError(f"The server has not ended within {wait} s.") from error
    if status != 0:
        raise LauncherError("The server was not stopped; the output contains the reason.")
    if _reader is not None:
        _reader.join(_LAST_WORDS_SECONDS)


def register_model(model_name: str, url: str) -> Answer:
    """Register a model with one worker and wait until the worker is ready.

    Args:
        model_name: Name of the model.
        url: A file in the model store, or the URL of the archive.
    """
    return register_model_with_params(
        {"model_name": model_name, "url": url, "initial_workers": 1, "synchronous": "true"}
    )


def register_model_with_params(params: Mapping[str, Any]) -> Answer:
    """Register a model.

    Args:
        params: Query parameters of ``POST /models``.

    Raises:
        OSError: No server answers.
    """
    client = Client(Destination(_address("management_address").client_url))
    try:
        answer = client.ask("POST", f"/models?{urlencode(params)}", timeout=_REGISTER_SECONDS)
    except ServerUnreachable as error:
        raise OSError(str(error)) from error
    return Answer(answer.status, answer.text)


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
            sys.stdout.write(f"{text}\n")  # one write: other threads print, too
            sys.stdout.flush()
            _keep(lines, text)
    _keep(lines, None)


def _keep(lines: "queue.Queue[str | None]", line: str | None) -> None:
    if line is None and lines.full():  # the reader must receive the end
        lines.get_nowait()
    with contextlib.suppress(queue.Full):
        lines.put_nowait(line)


def _command(*arguments: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    # As a module, because the console script may not be on PATH. -P keeps the working directory off
    # sys.path, where a logging.py of a model's author would hide Python's.
    command = [sys.executable, "-P", "-m", "marserve.frontend", *arguments]
    return subprocess.Popen(  # noqa: S603 - this interpreter, the caller's flags
        command, stdout=stdout, stderr=stdout and subprocess.STDOUT
    )


def _wait_until_open(address: Address) -> None:
    """Wait for the inference listener, which opens last."""
    deadline = time.monotonic() + _START_SECONDS
    started = _running_pid()
    while not _is_open(address):
        if started is None or _running_pid() != started:
            raise LauncherError(
                "The server ended during its start; its output contains the reason."
            )
        if time.monotonic() > deadline:
            raise LauncherError(f"The server does not answer after {_START_SECONDS:g} s.")
        time.sleep(_LOOK_SECONDS)


def _running_pid() -> int | None:
    try:
        return PidFile().read()
    except PidFileError as error:
        raise LauncherError(str(error)) from error


def _is_open(address: Address) -> bool:
    with contextlib.suppress(OSError):
        host = urlsplit(address.client_url).hostname
        socket.create_connection((host, address.port), timeout=_LOOK_SECONDS).close()
        return True
    return False


def _address(name: str) -> Address:
    """Return the address of a listener, from the configuration file."""
    key = KEYS[name]
    try:
        settings = find_config_file(_config_file, os.environ, snapshots=None).settings
        text = settings[name].text if name in settings else key.default or ""
        address = key.from_text(text)
    except (ConfigError, ValueError) as error:
        raise LauncherError(f"The address of the server is not known: {error}") from error
    if not isinstance(address, Address) or address.scheme != "http":
        raise LauncherError(f"{name}={text}: the launcher supports plain http only.")
    return address
