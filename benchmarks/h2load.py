"""Unary gRPC calls, by h2load (nghttp2): a generator in C, which takes little of the servers' time.

Each client is a connection of its own with one call in flight. h2load knows HTTP/2 and not gRPC: a
call that fails is a 200 without a message. So the bytes that came back are counted, and a run in
which one was missing is a failure and never a number.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from load import Measured

from marserve.tools.bench.measurement import percentile

_PROGRAM = shutil.which("h2load")
_LIMIT_SECONDS = 120.0
_PREFIX_BYTES = 5  # of gRPC before each message


class LoadFailed(Exception):
    """The generator is missing, or calls failed; what."""


@dataclass(frozen=True)
class Calls:
    """What is called.

    Attributes:
        port: On loopback.
        method: ``/package.Service/Method``.
        message_file: The request, with its prefix; see `write_message`.
        answer_bytes: The length of every answer's message.
    """

    port: int
    method: str
    message_file: Path
    answer_bytes: int


def write_message(path: Path, message: bytes) -> None:
    """Write a request as gRPC sends it: not compressed, then its length, then itself."""
    path.write_bytes(b"\0" + len(message).to_bytes(4, "big") + message)


def name() -> str:
    """The generator with its version.

    Raises:
        LoadFailed: It is not installed.
    """
    if _PROGRAM is None:
        raise LoadFailed("h2load is not installed; Debian's package is nghttp2-client")
    told = subprocess.run([_PROGRAM, "--version"], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def measure(calls: Calls, clients: int, count: int) -> Measured:
    """So many calls, by so many clients.

    Raises:
        LoadFailed: Not every call was answered with a message of the right length.
    """
    log = calls.message_file.with_name("calls.tsv")
    command = [str(_PROGRAM), f"-n{count}", f"-c{clients}", "-m1", "-t1", f"--log-file={log}"]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    command += ["-d", str(calls.message_file), f"http://127.0.0.1:{calls.port}{calls.method}"]
    log.unlink(missing_ok=True)  # it appends
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"{count} calls took more than {_LIMIT_SECONDS:.0f} s") from None
    rate = re.search(r"finished in \S+, ([\d.]+) req/s", done.stdout)
    received = re.search(r"\((\d+)\) data", done.stdout)
    wanted = count * (calls.answer_bytes + _PREFIX_BYTES)
    if rate is None or received is None or int(received[1]) != wanted:
        raise LoadFailed(f"not every call was answered: {(done.stdout + done.stderr)[-600:]}")
    times = sorted(int(line.split("\t")[2]) for line in log.read_text().splitlines())
    p50, p99 = (percentile(times, percent) / 1000 for percent in (50, 99))
    return Measured(float(rate[1]), p50, p99)
