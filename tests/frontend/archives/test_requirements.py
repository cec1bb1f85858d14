"""The cache around pip, with a fake interpreter in place of Python and pip."""

import asyncio
import os
from pathlib import Path

import pytest

from marserve.frontend.aio.background import Slots
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.requirements import (
    DependencyStore,
    ModelEnvironment,
    Requirements,
)
from marserve.frontend.archives.requirements_digest import requirements_digest
from marserve.frontend.errors import DependenciesFailed

# Answers the question about itself; installs by making the target, once for each line of `log`.
PYTHON = """#!/bin/sh
case "$*" in
  *sysconfig*) echo '["3.x", "linux", "{python}", []]' ;;
  *install*)
    echo installing
    echo run >> {folder}/log
    if [ -p {folder}/gate ]; then read line < {folder}/gate; fi
    if [ -e {folder}/broken ]; then echo "ERROR: first"; echo "ERROR: no wheel"; echo; exit 1; fi ;;
esac
"""


def helpers() -> HelperProcesses:
    return HelperProcesses(Slots(2, "helpers"), timeout=60)


class Installer:
    """A store with a fake interpreter, and a model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.model = folder, folder / "cache", folder / "model"
        self.model.mkdir()
        self.python = folder / "python"
        self.python.write_text(PYTHON.format(folder=folder, python=self.python))
        self.python.chmod(0o700)

    def store(self, **environment: str) -> DependencyStore:
        return DependencyStore(
            self.cache, str(self.python), {"PATH": "/usr/bin:/bin", **environment}, helpers()
        )

    def requirements(self, text: str = "tiny\n", directory: Path | None = None) -> Requirements:
        directory = directory or self.model
        directory.mkdir(exist_ok=True)
        (directory / "requirements.txt").write_text(text)
        return Requirements("m", directory, "requirements.txt", venv=False)

    def install(self, requirements: Requirements, **environment: str) -> ModelEnvironment:
        return asyncio.run(self.store(**environment).install(requirements))

    @property
    def installations(self) -> int:
        log = self.folder / "log"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def left(self) -> set[str]:
        """The files of the cache, without locks."""
        return {path.name for path in self.cache.iterdir() if path.suffix != ".lock"}


@pytest.fixture
def installer(tmp_path):
    return Installer(tmp_path)


def test_who_wants_nothing_gets_the_servers_environment(installer):
    requirements = Requirements("m", installer.model, "", venv=False)
    assert installer.install(requirements) == ModelEnvironment()
    assert not installer.cache.exists()


def test_the_same_is_installed_once_wherever_the_model_lies(installer, tmp_path):
    (installer.model / "a.whl").write_text("content")
    first = installer.install(installer.requirements("./a.whl\n"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "a.whl").write_text("content")
    assert installer.install(installer.requirements("./a.whl\n", elsewhere)) == first
    assert installer.installations == 1
    (directory,) = first.packages
    assert Path(directory).is_relative_to(installer.cache)


FULL = "--no-index\n-f links\n-r more.txt\nnamed @ file://./a.whl\n./source[extra]\n"
FILES = {
    "a.whl": "content",
    "b.zip": "content",
    "more.txt": "b.zip\n-r requirements.txt",
    "links/old.whl": "",
    "source/pyproject.toml": "",
    "source/pkg/code.py": "",
}


@pytest.mark.parametrize(
    ("changed", "count"),
    [
        ("requirements.txt", 2),
        ("a.whl", 2),
        ("b.zip", 2),
        ("more.txt", 2),
        ("links/new.whl", 2),
        ("source/pkg/code.py", 2),
        ("weights.pt", 1),
        ("links/weights.pt", 1),
    ],
)
def test_what_pip_would_look_at_makes_it_another_installation(changed, count, installer):
    for name, content in FILES.items():
        (installer.model / name).parent.mkdir(parents=True, exist_ok=True)
        (installer.model / name).write_text(content)
    first = installer.install(installer.requirements(FULL))
    assert installer.install(installer.requirements(FULL)) == first
    requirements = installer.requirements(FULL)
    (installer.model / changed).write_text(FULL + "# changed")
    assert (installer.install(requirements) == first) is (count == 1)
    assert installer.installations == count


def test_pips_settings_make_it_another_installation_and_other_variables_do_not(installer):
    first = installer.install(installer.requirements())
    assert installer.install(installer.requirements(), HOME="/other") == first
    assert installer.install(installer.requirements(), PIP_INDEX_URL="http://mirror") != first


def test_those_who_want_the_same_at_the_same_time_wait_for_the_first(installer):
    async def scenario():
        stores = [installer.store() for _ in range(3)]  # as in three servers
        return set(
            await asyncio.gather(*(store.install(installer.requirements()) for store in stores))
        )

    assert len(asyncio.run(scenario())) == 1
    assert installer.installations == 1


def test_a_failure_is_reported_by_pips_last_error_and_leaves_nothing(installer):
    (installer.folder / "broken").touch()
    with pytest.raises(DependenciesFailed) as failure:
        installer.install(installer.requirements())
    assert failure.value.message == (
        "Custom pip package installation failed for model m. ERROR: no wheel"
    )
    assert installer.left == set()
    (installer.folder / "broken").unlink()
    assert installer.install(installer.requirements()).packages


def test_a_cancelled_installation_ends_and_leaves_nothing(installer):
    os.mkfifo(installer.folder / "gate")

    async def scenario():
        installing = asyncio.ensure_future(installer.store().install(installer.requirements()))
        # Opened as soon as the installation reads it.
        gate = await asyncio.to_thread(os.open, installer.folder / "gate", os.O_WRONLY)
        installing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await installing
        with pytest.raises(BrokenPipeError):  # its reader has ended
            os.write(gate, b"x\n")
        os.close(gate)

    asyncio.run(scenario())
    assert installer.left == set()


def test_what_was_not_completed_is_made_again(installer):
    (directory,) = installer.install(installer.requirements()).packages
    home = Path(directory).parent
    (home / "complete").unlink()
    (home / "half").touch()
    assert installer.install(installer.requirements()).packages == (directory,)
    assert installer.installations == 2
    assert not (home / "half").exists()


@pytest.mark.parametrize("trouble", ["cache", "python"])
def test_what_the_server_cannot_do_is_reported_too(trouble, installer):
    if trouble == "cache":
        installer.cache.write_text("a file")
    else:
        installer.python.unlink()
    with pytest.raises(DependenciesFailed, match="dependency_cache="):
        installer.install(installer.requirements())


def test_by_default_the_cache_is_the_users(installer, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    store = DependencyStore(None, str(installer.python), {"PATH": "/usr/bin:/bin"}, helpers())
    (directory,) = asyncio.run(store.install(installer.requirements())).packages
    assert Path(directory).is_relative_to(tmp_path / "xdg" / "marserve" / "dependencies")


def test_requirements_that_include_a_pipe_hold_nobody_up(tmp_path):
    installer = Installer(tmp_path)
    os.mkfifo(installer.model / "more.txt")
    with pytest.raises(DependenciesFailed, match=r"failed for model m\. more\.txt is a pipe"):
        installer.install(installer.requirements("-r more.txt\n"))
    assert installer.installations == 0


def test_reading_a_large_file_gets_on(tmp_path):
    """A helper process without progress counts as hung."""
    (tmp_path / "requirements.txt").write_text("./large.whl\n")
    (tmp_path / "large.whl").write_bytes(bytes(5_000_000))
    steps = []
    requirements_digest(tmp_path, "requirements.txt", "[]", lambda: steps.append(None))
    assert len(steps) >= 5
