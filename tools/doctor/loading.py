"""``--load``: each archive's handler is loaded as a worker does it, in a process of its own.

That is ``marserve run`` without inputs. The process leads a group, which is ended with it.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Kind, Source

_QUOTED = 300


def load_archives(
    sources: Sequence[Source], config: Path | None, seconds: float
) -> Iterator[Finding]:
    """Load each archive of a model, one after the other."""
    for source in sources:
        if source.kind is Kind.ARCHIVE and source.path.suffix != ".war":
            yield _load(source, config, seconds)


def _load(source: Source, config: Path | None, seconds: float) -> Finding:
    command = [sys.executable, "-m", "marserve", "run", str(source.path.absolute())]
    if config is not None:
        command += ["--ts-config", str(config.absolute())]
    place = Place(source.name)
    failed, output = _run(command, seconds)
    if not failed:
        return finding("unchanged", place, f"loading {source.name}")
    return finding(
        "handler-load",
        place,
        f"{source.name} does not load: {failed if not output else _reason(output)}",
        f"See why: marserve run {source.path}",
    )


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """How a command failed, empty if it has not; and what it wrote."""
    environment = {name: value for name, value in os.environ.items() if name != "TS_CONFIG_FILE"}
    with subprocess.Popen(  # noqa: S603 - this very program
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"it took more than {seconds:g} s (--load-timeout).", ""
        finally:
            # Its children, too; before it is reaped its number is nobody else's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = output.decode(errors="replace")
    return ("", text) if process.returncode == 0 else (f"exit status {process.returncode}.", text)


def _reason(output: str) -> str:
    """The last line that says something: of a traceback, the exception."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:_QUOTED] if lines else "it said nothing."
