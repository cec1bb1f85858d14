"""Install the Python packages that models require, once for equal requirements.

An installation is a directory named after a digest of everything that determines its content
(`requirements_digest`); equal requirements share it, also in the next server. A file lock makes
simultaneous registrations wait for the first one. A directory is valid when it contains the mark
that is written after pip has succeeded. Installations are never removed.

pip runs in the model's directory, because requirements may name wheels there, and in the
environment of a worker, because the code that it runs is as untrusted.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from marserve.backend.processes.bootstrap import NOTHING_FROM_HERE, as_program
from marserve.frontend.aio.background import DaemonThreads
from marserve.frontend.aio.lines import MAX_LINE_BYTES, LineCutter
from marserve.frontend.archives.helper_process import HelperProcesses, child_process
from marserve.frontend.errors import DependenciesFailed
from marserve.frontend.logs.formats import log_lines

logger = logging.getLogger(__name__)
model_log = logging.getLogger("MODEL_LOG")

_MARK = "complete"
_LOCK_SECONDS = 0.1  # between two attempts to lock
_READ_SECONDS = 0.01  # between two reads of an output
# TorchServe's words for what failed.
_NO_PACKAGES = "Custom pip package installation"
_PIP_OPTIONS = ("--no-input", "--disable-pip-version-check", "--progress-bar=off", "--no-color")
# pip's variables and files may name another place, or no installation at all. An option wins over
# both; an empty one is none.
_ONLY_THERE = ("--no-user", "--root=/")
_OTHERWHERE = {"PIP_PREFIX", "PIP_PYTHON", "PIP_ROOT", "PIP_TARGET", "PIP_USER"}
# A variable wins over a file; these have no option that says no.
_REALLY = {"PIP_DRY_RUN": "0", "PIP_REQUIRE_VIRTUALENV": "0"}
# Prints what determines a virtual environment of an interpreter.
_ASK = f"""{NOTHING_FROM_HERE}
import json, site, sys, sysconfig
sites = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
print(json.dumps([sys.version, sysconfig.get_platform(), sys.executable, sites]))
"""


@dataclass(frozen=True)
class ModelEnvironment:
    """The Python environment of a model's workers; empty values mean the server's."""

    python: str = ""  # interpreter of its virtual environment
    packages: tuple[str, ...] = ()  # directories for sys.path


@dataclass(frozen=True)
class Requirements:
    """The packages that a model requires."""

    model: str  # its name
    directory: Path  # of its files
    file: str  # requirements file, relative to the directory; empty for none
    venv: bool  # whether it needs a virtual environment


@dataclass(eq=False)
class DependencyStore:
    """The installed packages of models."""

    root: Path | None  # None for a directory in the user's cache directory
    python: str  # to install for; empty for the server's
    environment: Mapping[str, str]  # of pip
    helpers: HelperProcesses

    def __post_init__(self) -> None:
        self.python = self.python or sys.executable
        self.environment = {
            name: value for name, value in self.environment.items() if name not in _OTHERWHERE
        }
        self._disk = DaemonThreads("installations", 4)
        self._interpreter: list[str | list[str]] = []

    async def install(self, requirements: Requirements) -> ModelEnvironment:
        """Return the environment with a model's packages, which are installed if necessary.

        There is no deadline: a large package over a slow connection may take long. Raises
        DependenciesFailed.
        """
        if not requirements.file and not requirements.venv:
            return ModelEnvironment()
        try:
            home = await self._home(requirements)
            async with self._locked(home.with_suffix(".lock")):
                if not await self._disk.run((home / _MARK).exists):
                    await self._install_into(requirements, home)
        except OSError as error:
            reason = f"{error} (dependency_cache={self.root or ''})"
            raise _failure(_NO_PACKAGES, requirements, reason) from error
        if requirements.venv:
            return ModelEnvironment(python=str(_python_in(home)))
        return ModelEnvironment(packages=(str(_packages_in(home)),))

    async def _home(self, requirements: Requirements) -> Path:
        if not self._interpreter:
            self._interpreter = json.loads(
                await self._run(requirements, ["-c", _ASK], is_logged=False)
            )
        root = self.root or _default_root()
        await self._disk.run(partial(root.mkdir, mode=0o700, parents=True, exist_ok=True))
        settings = [
            self._interpreter,
            requirements.venv,
            sorted(item for item in self.environment.items() if item[0].startswith("PIP_")),
        ]
        name: str = await self.helpers.run(
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
        with await self._disk.run(path.open, "w") as file:
            while True:  # no deadline: the other process is installing
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_SECONDS)
            yield

    async def _make_venv(self, requirements: Requirements, home: Path) -> None:
        """Make an environment that also sees the packages of its base interpreter.

        If that one is itself in a virtual environment, ``--system-site-packages`` would show the
        system's packages instead.
        """
        venv = _python_in(home).parents[1]
        making = as_program("venv", "--without-pip", str(venv))
        await self._run(requirements, making, failing="Virtual environment creation")
        (own,) = venv.glob("lib/python*/site-packages")
        sites = self._interpreter[3]
        lines = [f"import site; site.addsitedir({site!r})\n" for site in sites]
        (own / "marserve_base.pth").write_text("".join(lines), encoding="utf-8")

    async def _install_packages(self, requirements: Requirements, home: Path) -> None:
        if requirements.venv:
            prefix = _python_in(home).parents[1]
            options = ["-U", "--upgrade-strategy=only-if-needed", f"--prefix={prefix}", "--target="]
            python = str(_python_in(home))
        else:
            options = ["-U", "-t", str(_packages_in(home)), "--prefix="]
            python = self.python
        options += [*_PIP_OPTIONS, *_ONLY_THERE]
        installing = as_program("pip", "install", *options, "-r", requirements.file)
        scratch = home / "tmp"
        scratch.mkdir()
        variables = {**_REALLY, "TMPDIR": str(scratch)}
        await self._run(requirements, installing, python=python, variables=variables)
        await self._disk.run(partial(shutil.rmtree, scratch, ignore_errors=True))

    async def _run(
        self,
        requirements: Requirements,
        arguments: Sequence[str],
        *,
        python: str = "",
        failing: str = _NO_PACKAGES,
        is_logged: bool = True,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Run an interpreter, by default the one to install for; return its last line of output."""
        last = error = ""
        async with child_process(
            python or self.python,
            *arguments,
            cwd=requirements.directory,
            env={**self.environment, **variables},
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            cutter, is_last = LineCutter(), False
            while not is_last:
                data = await process.stdout.read(MAX_LINE_BYTES)
                is_last = not data
                lines = [line.rstrip() for line in cutter.cut(data, is_last=is_last)]
                last = next(filter(None, reversed(lines)), last)
                error = next((each for each in lines[::-1] if each.startswith("ERROR:")), error)
                if is_logged and lines:
                    extra = {"worker": f"pip-{requirements.model}"}
                    log_lines(model_log, logging.INFO, lines, extra)
                await asyncio.sleep(_READ_SECONDS)  # a setup.py may print without end
            status = await process.wait()
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
