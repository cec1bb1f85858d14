"""Rules of the house that no linter knows."""

import configparser
import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from marserve.frontend import errors
from marserve.frontend.configuration.config import KEYS, Config
from marserve.frontend.errors import ServeError
from marserve.frontend.workers.worker_state import TRANSITIONS, WorkerState

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


def listed(key: str) -> list[str]:
    return SETUP["options"][key].split()


def folders_of_packages() -> dict[str, Path]:
    """Each package of setup.cfg and its folder, by the longest prefix in package_dir."""
    pairs = (line.split("=") for line in SETUP["options"]["package_dir"].strip().splitlines())
    mapped = {name.strip(): Path(folder.strip()) for name, folder in pairs}
    found = {}
    for package in listed("packages"):
        parts = package.split(".")
        length = max(n for n in range(1, len(parts) + 1) if ".".join(parts[:n]) in mapped)
        found[package] = mapped[".".join(parts[:length])].joinpath(*parts[length:])
    return found


def run_python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=60
    )


# -- packages --------------------------------------------------------------------------------------


def test_every_folder_with_python_in_it_is_a_package_of_the_wheel():
    on_disk = {
        path.parent.relative_to(ROOT)
        for top in ("frontend", "backend", "handlers", "tools")
        for path in (ROOT / top).rglob("*.py")
    }
    assert set(folders_of_packages().values()) == on_disk


def test_every_data_file_of_a_package_is_in_the_wheel():
    folders = folders_of_packages()
    packed = {
        file
        for package, patterns in SETUP["options.package_data"].items()
        for pattern in patterns.split()
        for file in (ROOT / folders[package]).glob(pattern)
    }
    on_disk = {
        file
        for top in ("frontend", "backend", "handlers", "tools")
        for file in (ROOT / top).rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert packed == on_disk


def test_every_package_has_an_init_file():
    missing = [name for name, folder in folders_of_packages().items()
               if not (ROOT / folder / "__init__.py").is_file()]  # fmt: skip
    assert missing == ["marserve"]  # a namespace, so that other folders can be mapped into it


@pytest.mark.parametrize("folder", ["frontend", "backend", "handlers", "tools"])
def test_a_room_cannot_be_imported_by_its_bare_folder_name(folder):
    done = run_python(f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {folder}")
    assert done.returncode == 1
    assert f"import marserve.{folder}" in done.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        (
            "marserve.backend.worker",
            {
                "aiohttp",
                "marserve.frontend",
                "torch",
                "numpy",
                "yaml",
                "asyncio",
                "marserve.handlers",
            },
        ),
        ("marserve.frontend.server", {"torch", "marserve.handlers", "numpy", "PIL"}),
        ("marserve.frontend.cli", {"aiohttp", "torch", "marserve.frontend.server"}),
        ("marserve.frontend.archives.helper", {"aiohttp", "asyncio", "psutil", "uvloop"}),
        ("marserve.frontend.__main__", {"argparse", "marserve.frontend.cli", "torch"}),
        ("marserve.__main__", {"argparse", "marserve.frontend.cli", "torch"}),
    ],
)
def test_a_program_carries_no_more_than_it_needs(module, heavy):
    """spawn imports the main module again in each worker, and a worker is started in a blink."""
    done = run_python(f"import sys, {module}; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert heavy & set(done.stdout.split()) == set()


def test_no_two_purposes_share_the_threads_of_asyncio():
    """Where those of one hang, the others wait; and the interpreter's end waits for all of them."""
    using = [
        path.relative_to(ROOT)
        for path in (ROOT / "frontend").rglob("*.py")
        if re.search(r"asyncio\.to_thread\(|run_in_executor\(", path.read_text(encoding="utf-8"))
    ]
    assert using == []


def test_the_frontend_measures_the_host_in_one_place():
    """There a file of /proc that is blank ends nothing."""
    measuring = re.compile(
        r"psutil\.(virtual_memory|cpu_\w+|disk_usage|getloadavg)|\.memory_info\("
    )
    files = (ROOT / "frontend").rglob("*.py")
    found = {str(each.relative_to(ROOT)) for each in files if measuring.search(each.read_text())}
    assert found == {"frontend/measurements.py"}


def test_only_the_registration_changes_the_registry():
    changes = re.compile(
        r"registry\.(?:(?:add|replace|remove|set_default)\("
        r"|is_leaving = |catalog_progress(?:\.awaited\.\w+\(|\.\w+ = | = )"
        r"|failed\.(?:append|replace|forget|registered)\()"
    )
    texts = {
        str(path.relative_to(ROOT / "frontend")): path.read_text(encoding="utf-8")
        for path in (ROOT / "frontend").rglob("*.py")
    }
    using = {
        name
        for name, text in texts.items()
        if "import ModelRegistry" in text or ", ModelRegistry" in text
        if changes.search(text)
    }
    assert using == {"registration/manager.py"}


# -- configuration ---------------------------------------------------------------------------------


def test_every_key_stands_in_the_sample_configuration_once_and_no_other_does():
    text = (ROOT / "config.properties").read_text(encoding="utf-8")
    names = re.findall(r"^#?([a-z_]+)=", text, re.MULTILINE)
    not_keys = {"debugged", "notes", "texts", "warnings", "is_snapshot_found", "platform"}
    keys = [field.name for field in fields(Config) if field.name not in not_keys]
    assert sorted(names) == sorted(keys)
    assert set(KEYS) == set(keys)


# -- documentation ---------------------------------------------------------------------------------


def test_no_text_installs_the_package_by_name_until_there_is_a_release():
    code = (path for folder in ("frontend", "tools") for path in (ROOT / folder).rglob("*.py"))
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *code]
    names = r"pip install (?:-\S+ )*[\"']?marserve\b"
    assert [page for page in pages if re.search(names, page.read_text(encoding="utf-8"))] == []


# -- errors ----------------------------------------------------------------------------------------


def error_classes() -> list[type[ServeError]]:
    members = inspect.getmembers(errors, inspect.isclass)
    return [item for _, item in members if issubclass(item, ServeError) and item is not ServeError]


def tree() -> dict[str, str]:
    """Name and status of each error in the docstring of errors.py."""
    assert errors.__doc__ is not None
    return dict(re.findall(r"[├└]── (\w+)\s+(\d{3}|any)", errors.__doc__))


@pytest.mark.parametrize("error", error_classes())
def test_every_error_has_a_status_a_wire_word_and_a_branch_in_the_tree(error):
    assert 400 <= error.status <= 599
    assert re.fullmatch(r"[A-Z]\w+Exception", error.wire_type)
    assert tree()[error.__name__] in ("any", str(error.status))


def test_the_tree_of_errors_has_no_dead_branch():
    assert tree().keys() == {error_class.__name__ for error_class in error_classes()}


# -- workers ---------------------------------------------------------------------------------------


def test_the_table_of_a_workers_states_is_total():
    assert TRANSITIONS.keys() == set(WorkerState)
    assert set[WorkerState]().union(*TRANSITIONS.values()) <= set(WorkerState)
