"""The load: wrk where it is installed, else the benchmarks' own generator; one of them for all.

Clients are keep-alive connections with one request in flight each. A run in which an error came
back (a status of 400 or above) or a connection broke is a failure and never a number.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import open_loop
from load import Measured, Plan, generate

from marserve.tools.bench.errors import BenchError

_PROGRAM = shutil.which("wrk")
# After which a request without an answer is an error.
_TIMEOUT_SECONDS = 10
# What a run may take beyond its seconds.
_GRACE_SECONDS = 30.0
_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 60e3, "h": 3600e3}
# Without a request() function of the script's own, wrk builds the request once.
_SCRIPT = """\
local file = assert(io.open([[{body}]], "rb"))
wrk.method = "POST"
wrk.body = file:read("*a")
wrk.headers["Content-Type"] = "{content_type}"
file:close()
"""


class LoadFailed(Exception):
    """Errors came back, or too few answers, or none in time; what."""


@dataclass(frozen=True)
class Target:
    """What load generators need to know.

    Attributes:
        port: On loopback.
        path: Where the body is posted.
        body_file: What is posted.
        content_type: Of the body.
    """

    port: int
    path: str
    body_file: Path
    content_type: str = "application/octet-stream"


def name() -> str:
    """The generator in use, with its version."""
    if _PROGRAM is None:
        return "benchmarks/load.py"
    told = subprocess.run([_PROGRAM, "-v"], capture_output=True, text=True, check=False)
    return " ".join(told.stdout.split()[:2])


def measure(target: Target, clients: int, seconds: int) -> Measured:
    """So many clients for so long.

    Raises:
        LoadFailed: There were errors, or too few answers to count.
    """
    if _PROGRAM is None:
        return _measure_ourselves(target, clients, seconds)
    script = target.body_file.with_name("post.lua")
    script.write_text(_SCRIPT.format(body=target.body_file, content_type=target.content_type))
    command = [_PROGRAM, "-t1", f"-c{clients}", f"-d{seconds}s", "--latency"]
    command += [
        "--timeout",
        f"{_TIMEOUT_SECONDS}s",
        "-s",
        str(script),
        f"http://127.0.0.1:{target.port}{target.path}",
    ]
    limit = seconds + _GRACE_SECONDS
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        raise LoadFailed(f"wrk did not come to an end within {limit:.0f} s") from None
    return parse(done.stdout + done.stderr)


def measure_open_loop(
    target: Target, rate: float, warm_up: float, seconds: float, seed: int
) -> Measured:
    """Requests that arrive by themselves, by `open_loop`: wrk has no such thing.

    Raises:
        LoadFailed: Not every request was answered with success and in time.
    """
    asked = open_loop.Arrivals(
        target.port,
        target.path,
        str(target.body_file),
        rate,
        seconds,
        goal=_GRACE_SECONDS,
        seed=seed,
        warm_up=warm_up,
    )
    try:
        outcome = open_loop.run(asked)
    except (BenchError, RuntimeError) as error:
        raise LoadFailed(str(error)) from None
    if outcome.good < 1:
        raise LoadFailed(f"at {rate:.0f} requests/s {1 - outcome.good:.1%} had no answer in time")
    return Measured(rate, outcome.p50_ms, outcome.p99_ms)


def parse(report: str) -> Measured:
    """Read what wrk printed.

    Raises:
        LoadFailed: It counted errors, or did not come as far as counting.
    """
    for symptom in (r"Non-2xx or 3xx responses: .*", r"Socket errors: .*"):
        if found := re.search(symptom, report):
            raise LoadFailed(found[0])
    rate = re.search(r"^Requests/sec:\s+([\d.]+)", report, re.MULTILINE)
    p50, p99 = (_latency_ms(report, percent) for percent in (50, 99))
    if rate is None or p50 is None or p99 is None or not float(rate[1]):
        raise LoadFailed(f"no answers: {report.strip()[-300:]}")
    return Measured(float(rate[1]), p50, p99)


def _latency_ms(report: str, percent: int) -> float | None:
    found = re.search(rf"^\s+{percent}%\s+([\d.]+)(us|ms|s|m|h) *$", report, re.MULTILINE)
    return float(found[1]) * _MILLISECONDS[found[2]] if found else None


def _measure_ourselves(target: Target, clients: int, seconds: int) -> Measured:
    plan = Plan(
        target.port,
        target.path,
        str(target.body_file),
        clients,
        seconds,
        warm_up=0.0,
        content_type=target.content_type,
        timeout=_TIMEOUT_SECONDS,
    )
    try:
        return generate(plan)
    except (BenchError, RuntimeError) as error:
        raise LoadFailed(str(error)) from None
