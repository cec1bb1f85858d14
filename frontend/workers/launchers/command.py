"""Starts workers by a command line, in any interpreter (`backend.processes.bootstrap`).

It costs an interpreter start and the import of torch for every worker. Models with their own
packages need it (the fork server has imported the server's already), and so do another ``python``
and workers of several processes.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
from functools import partial

from marserve.backend.processes.bootstrap import (
    WorkerConfig,
    as_program,
    command,
    environment_after_start,
    environment_at_start,
    probe,
)
from marserve.frontend.workers.launchers.local_process import Started, WorkerSpec, our_ends

logger = logging.getLogger(__name__)

#: The module that is torch's launcher for CPUs.
CPU_LAUNCHER = "torch.backends.xeon.run_cpu"

_PROBE_SECONDS = 60.0


def start_command(spec: WorkerSpec) -> Started:
    """Start a worker in its own interpreter; blocks."""
    with our_ends() as (ours, sock, their_sock, stacks):
        config = WorkerConfig(
            sock=their_sock.fileno(),
            python_path=spec.python_path,
            model_dir=spec.model_dir,
            threads=spec.threads,
            environment=environment_after_start(spec.environment),
            runner=spec.runner,
            stacks=stacks.path,
            terminal_of=os.getpid() if spec.terminal else 0,
        )
        process = subprocess.Popen(  # noqa: S603 - the operator's interpreter
            command(spec.python or sys.executable, config),
            env=environment_at_start(spec.environment, spec.python_path),
            cwd=spec.model_dir,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=[their_sock.fileno()],
            start_new_session=not spec.terminal,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        ours.enter_context(process.stdout)
        ours.enter_context(process.stderr)
        try:
            sentinel = os.pidfd_open(process.pid)
        except OSError:  # no descriptor left
            process.kill()
            process.wait()
            raise
        return Started(
            pid=process.pid,
            sentinel=sentinel,
            sock=sock,
            stdout=process.stdout,
            stderr=process.stderr,
            stacks=stacks,
            reap=partial(_reap, process),
            kill=partial(_kill, process, sentinel),
        )


async def _reap(process: "subprocess.Popen[bytes]") -> int:
    return process.wait()  # returns at once: it has ended


def _kill(process: "subprocess.Popen[bytes]", sentinel: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # one that is debugged leads no group
    os.close(sentinel)
    process.wait()


def check_interpreter(spec: WorkerSpec) -> None:
    """Raise OSError unless an interpreter can run workers."""
    try:
        _run_probe(probe(spec.python), environment_at_start(spec.environment, spec.python_path))
    except OSError as error:
        raise OSError(f"The interpreter {spec.python} cannot run workers: {error}") from error


def cpu_launcher_works(python: str, arguments: str) -> bool:
    """Return whether torch's launcher for CPUs can be used; logs a warning if it cannot.

    ``python`` is the interpreter of the workers, empty for this one; ``arguments`` are those of
    the configuration, which may not fit this machine.
    """
    words = [*arguments.split(), "--no-python", "true"]
    try:
        _run_probe([python or sys.executable, *as_program(CPU_LAUNCHER, *words)])
    except OSError as error:
        logger.warning(
            "Workers start without the CPU launcher, and are not bound to cores: %s %s: %s",
            CPU_LAUNCHER,
            " ".join(words),
            error,
        )
        return False
    return True


def _run_probe(arguments: list[str], environment: dict[str, str] | None = None) -> None:
    """Run a command; raises OSError with the last line of its errors if it fails."""
    try:
        subprocess.run(  # noqa: S603 - the operator's interpreter
            arguments,
            env=environment,
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit status {error.returncode}"
        raise OSError(reason.splitlines()[-1]) from error
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it has not ended after {_PROBE_SECONDS:g} s") from error
