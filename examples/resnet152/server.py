"""The demo's server: checks before the start, start and stop."""

import contextlib
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from terminal import DemoFailed, readable, show, start

from marserve.frontend.configuration.config import Config
from marserve.frontend.lifecycle.pidfile import PidFile

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0  # after the time for accepted requests


@contextlib.contextmanager
def running_server(
    config: Config, config_file: Path | None, log: Path
) -> "Iterator[subprocess.Popen[bytes]]":
    """Start the server, wait for it, and stop it at the end.

    Args:
        config: The server's configuration.
        config_file: Its file; None for config.properties in this directory.
        log: File for the server's output.

    Raises:
        DemoFailed: The server does not start, or ends.
    """
    chosen = ["--ts-config", readable(config_file)] if config_file else []
    # Without snapshots, so that each run starts with an empty server.
    process = start(["torchserve", "--foreground", "--ncs", *chosen], log)
    try:
        _wait_until_up(process, config, log)
        yield process
    finally:
        _stop(process, config.drain_timeout + _STOP_SECONDS)


def check_startable(config: Config) -> None:
    """Check that the server can start, before anything is packed.

    Raises:
        DemoFailed: Another server runs, an address is in use, or the settings are unsuitable.
    """
    pid = PidFile().read()
    if pid is not None:
        raise DemoFailed(f"A server is already running (pid {pid}): torchserve --stop ends it.")
    if config.token_authorization or not config.model_api:
        raise DemoFailed(
            "The demo registers a model without a token; this configuration forbids it. Bind all "
            "listeners to 127.0.0.1, or set disable_token_authorization and enable_model_api."
        )
    if not config.enable_metrics_api or not all(each.port for each in config.listeners):
        raise DemoFailed("The demo needs the metrics listener, and ports that are not 0.")
    for address in dict.fromkeys(config.listeners):
        _check_free(address.host, address.port)


def _check_free(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise DemoFailed(
                f"Cannot listen on {host}:{port} ({error.strerror}). End the program that does, "
                "or choose another port in config.properties."
            ) from None


def _wait_until_up(process: "subprocess.Popen[bytes]", config: Config, log: Path) -> None:
    """Wait until the process listens; at the address alone another server may answer."""
    deadline = time.monotonic() + _START_SECONDS
    while not _listens(process.pid, config.inference_address.port):
        if process.poll() is not None:
            raise DemoFailed(f"The server ended at once. Its output:\n{_last_lines(log)}")
        if time.monotonic() > deadline:
            raise DemoFailed(f"The server did not start in {_START_SECONDS:g} s; see {log}.")
        time.sleep(0.05)


def _listens(pid: int, port: int) -> bool:
    return any(
        each.pid == pid and each.status == psutil.CONN_LISTEN and each.laddr.port == port
        for each in psutil.net_connections("tcp")
    )


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-5:])


def _stop(process: "subprocess.Popen[bytes]", timeout: float) -> None:
    """Stop the process; ``torchserve --stop`` would stop the server of the pid file."""
    if process.poll() is not None:
        return
    try:
        show(["kill", str(process.pid)])
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    finally:
        if process.poll() is None:  # interrupted, or it did not stop
            process.kill()
            process.wait()
