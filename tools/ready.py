"""``marserve ready``: requests ``/ready`` from the server of this machine.

For health checks of containers without curl. The pid file names the process, and the kernel has the
flags, environment and directory with which it was started.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from marserve.frontend.cli import build_parser, load_config_of
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError
from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.bench.client import Client
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination

_PROGRAMS = ("torchserve", "marserve", "marserve.frontend")


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
        # The server is on this machine; its certificate may be self-signed.
        destination = Destination(_inference_url(), verify=False)
        answer = Client(destination, timeout=options.timeout).ask("GET", "/ready")
    except (ConfigError, PidFileError, BenchError) as error:
        print_text(f"The server cannot be checked: {error}")
        return 1
    print_text(answer.text.strip())
    return int(not answer.is_success)


def _inference_url() -> str:
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
    return load_config_of(options).inference_address.client_url


def _texts(file: Path) -> list[str]:
    """Return the texts of a file of /proc, each of which a null byte ends."""
    return os.fsdecode(file.read_bytes()).split("\0")[:-1]
