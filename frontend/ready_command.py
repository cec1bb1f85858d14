"""``marserve ready``: requests ``/ready`` from the server of this machine.

For health checks of containers without curl. The pid file names the process, and the kernel has the
flags, environment and directory with which it was started.
"""

import argparse
import http.client
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from marserve.frontend.cli import build_parser, load_config_of
from marserve.frontend.configuration.addresses import Address, UnixAddress
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError
from marserve.frontend.lifecycle.terminal import print_text

_PROGRAMS = ("torchserve", "marserve", "marserve.frontend")
_MAX_BYTES = 10_000


def main(argv: Sequence[str]) -> int:
    """Run ``marserve ready``; return 0 if the server is ready, else 1."""
    parser = argparse.ArgumentParser(
        prog="marserve ready", description="Requests /ready from the running server."
    )
    parser.add_argument(
        "--timeout", type=float, default=5.0, metavar="SECONDS", help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    try:
        address = _inference_address()
        status, text = _get(address, options.timeout)
    except (ConfigError, PidFileError, OSError, http.client.HTTPException) as error:
        print_text(f"The server cannot be checked: {error}")
        return 1
    print_text(text.strip())
    return int(status != http.HTTPStatus.OK)


def _inference_address() -> Address | UnixAddress:
    pid = PidFile().read()
    if pid is None:
        raise PidFileError("no server is running.")
    process = Path("/proc", str(pid))
    try:
        words, variables = _texts(process / "cmdline"), _texts(process / "environ")
        directory = (process / "cwd").readlink()
    except OSError as error:
        raise PidFileError(f"process {pid} cannot be read: {error}") from error
    program = next((at for at, word in enumerate(words) if at and Path(word).name in _PROGRAMS), 0)
    options, _ = build_parser().parse_known_args(words[program + 1 :])
    # Read the configuration as the server did.
    os.chdir(directory)
    os.environ.clear()
    pairs = (each.partition("=") for each in variables)
    os.environ.update({name: value for name, _, value in pairs if name})
    return load_config_of(options).inference_address


def _texts(file: Path) -> list[str]:
    """Return the texts of a file of /proc, each of which a null byte ends."""
    return os.fsdecode(file.read_bytes()).split("\0")[:-1]


def _get(address: Address | UnixAddress, timeout: float) -> tuple[int, str]:
    if isinstance(address, UnixAddress):
        connection: http.client.HTTPConnection = _UnixConnection(address.path, timeout)
    else:
        host = address.client_host
        if address.scheme == "https":
            unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            # A server of this machine; its certificate may be self-signed.
            unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(
                host, address.port, timeout=timeout, context=unverified
            )
        else:
            connection = http.client.HTTPConnection(host, address.port, timeout=timeout)
    try:
        connection.request("GET", "/ready")
        answer = connection.getresponse()
        return answer.status, answer.read(_MAX_BYTES).decode(errors="replace")
    finally:
        connection.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))
