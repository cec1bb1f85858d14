"""Installs the Python packages that a model requires, once for equal requirements.

An installation is in a directory named after a digest of everything that determines its content
(`requirements_digest`), so equal requirements share a directory, also in the next registration or
server. Simultaneous registrations wait for the first one, by a file lock. A directory is valid only
when pip has succeeded and its mark was written; what a killed installation left is removed by the
next one. Old installations are never removed: the cache may be deleted while no server uses it.

pip installs into a plain directory that the model's workers have on ``sys.path`` or, with
``useVenv``, into a virtual environment that also sees the packages of the interpreter it was made
from. It runs in the model's directory, so that requirements may name wheels in the archive, with
the environment of a worker: the code it runs is no less foreign.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from marserve.backend.processes.bootstrap import NOTHING_FROM_HERE, as_program
from marserve.frontend.aio.background import DaemonThreads
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.errors import DependenciesFailed
from marserve.frontend.process_group import ProcessGroup

logger = logging.getLogger(__name__)
model_log = logging.getLogger("MODEL_LOG")

_MARK = "complete"
_DISK_THREADS = 4
_LOCK_SECONDS = 0.1  # between two tries to take a lock that another process holds
_MAX_LINE_BYTES = 1 << 20
# TorchServe's words for what failed.
_NO_PACKAGES = "Custom pip package installation"
_NO_VENV = "Virtual environment creation"
_PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--no-color")
# What a virtual environment has to know of the interpreter it is made from.
_ASK = f"""{NOTHING_FROM_HERE}
import json, site, sys, sysconfig
sites = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
print(json.dumps([sys.version, sysconfig.get_platform(), sys.executable, sites]))
"""


@dataclass(frozen=True)
class ModelEnvironment:
    """What the workers of a model run in, where it is not the server's environment."""

    python: str = ""  # interpreter of its virtual environment; empty without one
    packages: tuple[str, ...] = ()  # directories for sys.path


@dataclass(frozen=True)
class Requirements:
    """What a model asks for."""

    model: str  # its name
    directory: Path  # where its files lie
    file: str  # in there, relative; empty for none
    venv: bool  # whether it wants a virtual environment


class DependencyStore:
    """Keeps what was installed under ``root``, by default the user's cache directory.

    ``python`` is the interpreter to install for, by default the server's; ``environment`` that of
    pip, and of the code it runs. ``helpers`` read what a model asks for.
    """

    def __init__(
        self,
        root: Path | None,
        python: str,
        environment: Mapping[str, str],
        helpers: HelperProcesses,
    ) -> None:
        self._root = root
        self._python = python or sys.executable
        self._environment = environment
        self._helpers = helpers
        self._disk = DaemonThreads("installations", _DISK_THREADS)
        self._interpreter: list[str | list[str]] = []

    async def install(self, requirements: Requirements) -> ModelEnvironment:
        """Find what a model asks for, or install it; cancelled, it leaves nothing half-done.

        There is no deadline: a large package over a slow line takes what it takes.

        Raises:
            DependenciesFailed: It cannot be installed; says why.
        """
        if not requirements.file and not requirements.venv:
            return ModelEnvironment()
        try:
            home = await self._home(requirements)
            async with self._locked(home.with_suffix(".lock")):
                if not await self._disk.run((home / _MARK).exists):
                    await self._install_into(requirements, home)
        except OSError as error:
            reason = f"{error} (dependency_cache={self._root or ''})"
            raise _failure(_NO_PACKAGES, requirements, reason) from error
        if requirements.venv:
            return ModelEnvironment(python=str(_python_in(home)))
        return ModelEnvironment(packages=(str(_packages_in(home)),))

    async def _home(self, requirements: Requirements) -> Path:
        """The directory for just this; the one above it exists."""
        if not self._interpreter:
            self._interpreter = json.loads(
                await self._run(requirements, ["-c", _ASK], is_logged=False)
            )
        root = self._root or _default_root()
        await self._disk.run(partial(root.mkdir, mode=0o700, parents=True, exist_ok=True))
        settings = [
            self._interpreter,
            requirements.venv,
            sorted(item for item in self._environment.items() if item[0].startswith("PIP_")),
        ]
        name: str = await self._helpers.run(
            "digest",
            directory=str(requirements.directory),
            file=requirements.file,
            settings=json.dumps(settings),
        )
        return root / name

    async def _install_into(self, requirements: Requirements, home: Path) -> None:
        logger.info("Installing the packages of model %s into %s.", requirements.model, home)
        try:
            await self._disk.run(_clear, home)
            if requirements.venv:
                await self._make_venv(requirements, home)
            if requirements.file:
                await self._install_packages(requirements, home)
            await self._disk.run((home / _MARK).touch)
        except BaseException:
            await self._disk.run(partial(shutil.rmtree, home, ignore_errors=True))
            raise

    @contextlib.asynccontextmanager
    async def _locked(self, path: Path) -> AsyncIterator[None]:
        """Hold a lock against everybody else, in this process and in others."""
        with await self._disk.run(path.open, "w") as file:
            while True:  # no deadline: the other one is installing
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_SECONDS)
            yield

    async def _make_venv(self, requirements: Requirements, home: Path) -> None:
        """Make an environment that sees the interpreter's own packages behind its own.

        ``--system-site-packages`` would show those of the system even where the interpreter is
        itself in a virtual environment.
        """
        venv = _python_in(home).parents[1]
        making = as_program("venv", "--without-pip", str(venv))
        await self._run(requirements, making, failing=_NO_VENV)
        (own,) = venv.glob("lib/python*/site-packages")
        sites = self._interpreter[3]
        lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
        (own / "marserve_base.pth").write_text("".join(lines), encoding="utf-8")

    async def _install_packages(self, requirements: Requirements, home: Path) -> None:
        if requirements.venv:
            options = ["-U", "--upgrade-strategy=only-if-needed"]
            python = str(_python_in(home))
        else:
            options = ["-U", "-t", str(_packages_in(home))]
            python = self._python
        installing = as_program("pip", "install", *_PIP_OPTIONS, *options, "-r", requirements.file)
        # What it leaves behind when it is killed is removed with the directory.
        scratch = home / "tmp"
        scratch.mkdir()
        await self._run(requirements, installing, python=python, TMPDIR=str(scratch))
        await self._disk.run(partial(shutil.rmtree, scratch, ignore_errors=True))

    async def _run(
        self,
        requirements: Requirements,
        arguments: Sequence[str],
        *,
        python: str = "",
        failing: str = _NO_PACKAGES,
        is_logged: bool = True,
        **variables: str,
    ) -> str:
        """Run an interpreter, by default the one to install for, to its end; its last line.

        Raises:
            DependenciesFailed: It failed.
            OSError: It could not be started.
        """
        process = await asyncio.create_subprocess_exec(
            python or self._python,
            *arguments,
            cwd=requirements.directory,
            env={**self._environment, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        group = ProcessGroup(process.pid)
        last = error = ""
        try:
            assert process.stdout is not None
            async for line in process.stdout:
                text = line.decode(errors="backslashreplace").rstrip()
                last = text or last
                error = text if text.startswith("ERROR:") else error
                if is_logged:
                    model_log.info("%s", text, extra={"worker": f"pip-{requirements.model}"})
            status = await process.wait()
        finally:
            if process.returncode is None:
                group.send(signal.SIGKILL)
                await process.wait()
            group.close()
        if status:
            raise _failure(failing, requirements, error or last or f"exit status {status}")
        return last


def _failure(what: str, requirements: Requirements, reason: str) -> DependenciesFailed:
    return DependenciesFailed(f"{what} failed for model {requirements.model}. {reason}")


def _default_root() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    if not os.path.isabs(cache):  # noqa: PTH117 - a text
        raise OSError("the user has no home directory")
    return Path(cache) / "marserve" / "dependencies"


def _clear(home: Path) -> None:
    if home.exists():
        shutil.rmtree(home)
    home.mkdir(mode=0o700)


def _python_in(home: Path) -> Path:
    return home / "venv" / "bin" / "python"


def _packages_in(home: Path) -> Path:
    return home / "packages"
