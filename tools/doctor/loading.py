"""``--load``: load each archive's handler in a separate process, as a worker does.

The process is ``marserve run`` without inputs. It leads a process group, which is killed with it.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from marserve.frontend.process_group import ProcessGroup
from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Kind, Source

_QUOTED = 300
_MAX_READ = 64 << 10  # bytes, from the end of its output


def load_archives(
    sources: Sequence[Source], config: Path | None, seconds: float
) -> Iterator[Finding]:
    """Load the archives of models one after the other, and return their findings."""
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
        f"{source.name} does not load: {_reason(output) or failed}",
        f"Show the reason: marserve run {source.path}",
    )


def _run(command: Sequence[str], seconds: float) -> tuple[str, str]:
    """Run a command; return its failure, empty for success, and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TS_CONFIG_FILE"}
    # Not a pipe, because a child that outlives the process would keep it open.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(  # noqa: S603 - this program
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        group = ProcessGroup(process.pid)
        try:
            failed = f"exit status {status}." if (status := process.wait(seconds)) else ""
        except subprocess.TimeoutExpired:
            failed = f"it took more than {seconds:g} s (--load-timeout)."
        finally:
            group.send(signal.SIGKILL)  # with its children
            group.close()
            process.wait()
        if process.returncode == -signal.SIGKILL:
            return failed, ""
        output.seek(max(0, output.seek(0, os.SEEK_END) - _MAX_READ))
        return failed, output.read(_MAX_READ).decode(errors="replace")


def _reason(output: str) -> str:
    """Return the last line that is not empty; in a traceback, that is the exception."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:_QUOTED] if lines else ""
