"""Fuzzes the parsers for longer than the tests do: `make fuzz`, or from the folder tests:

    python -m fuzz --seconds 60 --engine atheris http manifest

Each target runs in a process of its own. An input that fails is made shorter, written to the
corpus, where it stays as a test, and told of with its traceback.
"""

import argparse
import hashlib
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from typing import NoReturn

from fuzz import catalog
from fuzz.limits import LimitExceeded, measure
from fuzz.mutations import inputs, shortest
from hypothesis import HealthCheck, Phase, given, seed, settings

ENGINES = ("hypothesis", "atheris")
_MAX_PROCESS_BYTES = 16 << 30
_MAX_INPUT_BYTES = 4096
_SECONDS_TO_START_AND_END = 120.0
_SHORTENING_SECONDS = 30.0
# Memory is measured of one in so many inputs: it triples their time.
_MEASURED = 8
_INSTRUMENTED = ["marserve", "yaml", "fuzz.targets"]


def main() -> int:
    """Run targets one after the other; 1 if one has failed."""
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", help=", ".join(catalog.NAMES))
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each target")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="to do the same again")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.targets) - set(catalog.NAMES):
        parser.error(f"there is no target {', '.join(unknown)}")
    if options.child:
        _fuzz(options.targets[0], options)
    failed = [name for name in options.targets or catalog.NAMES if not _passes(name, options)]
    return int(bool(failed))


def _passes(name: str, options: argparse.Namespace) -> bool:
    """Fuzz one target in a process of its own; return whether it has not failed."""
    command = [sys.executable, "-m", "fuzz", name, "--child", "--engine", options.engine]
    command += ["--seconds", str(options.seconds), "--seed", str(options.seed)]
    quiet = subprocess.DEVNULL if options.engine == "atheris" else None  # it tells of each step
    timeout = options.seconds + _SECONDS_TO_START_AND_END
    print(f"{name}: {options.engine}, seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        try:
            environment = {**os.environ, "TMPDIR": folder}  # it may end without tidying up
            done = subprocess.run(command, stderr=quiet, timeout=timeout, env=environment)
        except subprocess.TimeoutExpired:
            print(f"{name}: it hangs")
            return False
        return done.returncode == 0


def _fuzz(name: str, options: argparse.Namespace) -> NoReturn:
    logging.disable(logging.CRITICAL)  # what is said about garbage is nobody's concern here
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_PROCESS_BYTES, _MAX_PROCESS_BYTES))
    if options.engine == "atheris":
        _fuzz_with_atheris(name, options)
    session = _Session(name, options.seconds)
    for number in range(options.seed, options.seed + (1 << 32)):
        _fuzz_with_hypothesis(session, number)
    raise AssertionError("the session ends the process")


def _fuzz_with_hypothesis(session: "_Session", number: int) -> None:
    @seed(number)
    @settings(
        max_examples=500,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(inputs(session.name))
    def execute(data: bytes) -> None:
        session.execute(data)

    execute()


def _fuzz_with_atheris(name: str, options: argparse.Namespace) -> NoReturn:
    import atheris

    with atheris.instrument_imports(include=_INSTRUMENTED):
        catalog.load(name)
    session = _Session(name, options.seconds)
    arguments = ["fuzz", f"-seed={options.seed % (1 << 31)}", f"-max_len={_MAX_INPUT_BYTES}"]
    arguments += ["-timeout=3600", "-rss_limit_mb=0", f"-dict={catalog.WORDS}"]
    found = tempfile.mkdtemp()
    atheris.Setup([*arguments, found, str(catalog.FOLDER / name)], session.execute)
    atheris.Fuzz()
    raise AssertionError("the session ends the process")


class _Session:
    """Executes a target until its time is over or it fails, and then ends the process."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name = name
        self._module = catalog.load(name)
        self._began, self._began_cpu = time.monotonic(), time.process_time()
        self._seconds = seconds
        self._executed = 0

    def execute(self, data: bytes) -> None:
        """Execute it once."""
        if time.monotonic() - self._began > self._seconds:
            self._end(0, "nothing was found")
        self._executed += 1
        try:
            self._measure(data)
        except Exception as error:  # noqa: BLE001 - whatever a parser raises
            self._fail(data, error)

    def _measure(self, data: bytes) -> None:
        with_memory = zlib.crc32(data) % _MEASURED == 0
        measure(self._module.target, data, self._module.LIMITS, with_memory=with_memory)

    def _fail(self, data: bytes, error: Exception) -> NoReturn:
        seconds, cpu = time.monotonic() - self._began, time.process_time() - self._began_cpu
        place = _place(error)
        is_limit = isinstance(error, LimitExceeded)
        end = time.monotonic() + _SHORTENING_SECONDS

        def fails(shorter: bytes) -> bool:
            if time.monotonic() > end:
                return False
            try:
                measure(self._module.target, shorter, self._module.LIMITS, with_memory=is_limit)
            except Exception as other:  # noqa: BLE001 - as above
                return _place(other) == place
            return False

        short = shortest(data, fails) if fails(data) else data
        path = catalog.FOLDER / self.name / f"found-{hashlib.sha256(short).hexdigest()[:8]}"
        path.write_bytes(short)
        traceback.print_exception(error, file=sys.stdout)
        print(f"{short!r:.500}")
        spent = f"{seconds:.1f} s, {cpu:.1f} of CPU time"
        self._end(1, f"failed after {spent}, with {len(data)} bytes: {path}")

    def _end(self, status: int, outcome: str) -> NoReturn:
        seconds = time.process_time() - self._began_cpu
        rate = self._executed / seconds
        print(
            f"{self.name}: {self._executed} executions, {rate:.0f} in a second of CPU time; "
            f"{outcome}",
            flush=True,
        )
        os._exit(status)  # both engines would go on


def _place(error: Exception) -> tuple[type[Exception], int]:
    """What went wrong, and where in the code."""
    frames = traceback.extract_tb(error.__traceback__)
    return type(error), frames[-1].lineno or 0


if __name__ == "__main__":
    sys.exit(main())
