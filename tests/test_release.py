"""What is released: the archives that are built, and servers installed from them.

A server is installed into environments without anything of this one: with only what the core
needs, with the oldest versions that setup.cfg allows, and for each Python that it names and this
machine has.
"""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from email.parser import Parser
from pathlib import Path

import pytest
from servers import Server

pytestmark = [pytest.mark.integration, pytest.mark.release, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[1]
SETUP = configparser.ConfigParser(interpolation=None)
SETUP.read(ROOT / "setup.cfg")
PYTHONS = re.findall(r":: Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
IMPORT_NAMES = ("marserve", "ts", "model_archiver", "workflow_archiver")
OPTIONAL = ("grpc", "s3", "tls")  # extras that a server without torch can have
NEAR_DEPENDENCIES = ("grpc", "http", "configuration", "telemetry")  # tests that depend on them most
FOR_TESTS = [
    "hypothesis",
    "jsonschema",
    "numpy",
    "openapi-spec-validator",
    "opentelemetry-api",
    "prometheus-client",
    "pytest-timeout",
    "requests",
]
NO_CACHE = ["-p", "no:cacheprovider"]
# grpcio-tools, which has protoc, needs a newer protobuf than the oldest that is allowed.
WITHOUT_PROTOC = [
    "--deselect",
    "tests/frontend/grpc/test_messages.py::test_the_descriptors_are_those_of_the_files",
]
GENERATED = shutil.ignore_patterns("__pycache__", "*.egg-info")


Install = Callable[..., Path]

ECHO = """
def handle(data, context):
    return data and [bytes(row["body"]).decode() + " of %d" % len(data) for row in data]
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The source archive, and the wheel that was made of it."""
    tree = tmp_path_factory.mktemp("release") / "marserve"
    tree.mkdir()
    for file in ("LICENSE", "README.md", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / file, tree)
    for folder in ("frontend", "backend", "handlers", "tools", "docs"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=GENERATED)
    run([sys.executable, "-m", "build", tree])
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    return only(dist.glob("*.whl"))


@pytest.fixture
def install(tmp_path, wheel):
    """Install the wheel into an environment of its own; returns the folder of its commands."""

    def install(python, *words, extras=""):
        commands = tmp_path / "environment" / "bin"
        run([python, "-m", "venv", "--without-pip", commands.parent])
        pip = [sys.executable, "-m", "pip", "--python", commands / "python"]
        run([*pip, "install", "-q", f"{wheel}{extras}", *words])
        return commands

    return install


@pytest.fixture
def assert_serves(tmp_path):
    """Pack, start, register, predict, describe and stop by the commands in a folder."""
    servers = []

    def check(commands):
        work = tmp_path / "work"
        work.mkdir()
        search = {"PATH": f"{commands}:{os.environ['PATH']}"}
        server = Server(work, search, {}, program=commands / "torchserve")
        servers.append(server)
        (work / "echo.py").write_text(ECHO)
        pack = ["--model-name", "echo", "--version", "1.0", "--handler", "echo.py"]
        run([commands / "torch-model-archiver", *pack, "--export-path", server.store], work)
        server.start()
        home = str(commands.parent)
        assert all(home in " ".join(process.cmdline()) for process in server.processes())
        answer = server.register("echo.mar", initial_workers=1, batch_size=2, max_batch_delay=5)
        assert answer.status_code == 200, answer.text
        assert server.predict("echo", data=b"a body").text == "a body of 1"
        assert server.inference("OPTIONS", "/").json()["openapi"]
        assert server.metrics("ts_inference_requests_total")
        assert server.describe("echo")["workers"][0]["status"] == "READY"
        server.stop()

    yield check
    for server in servers:
        server.close()


def run(command: Sequence[str | Path], cwd: Path | None = None) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def only(paths: Iterator[Path]) -> Path:
    (path,) = paths
    return path


def interpreter(version: str) -> str:
    """A Python of a version; without one the test is skipped."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version:
        return sys.executable
    homes = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = [*map(str, homes.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]
    for python in filter(None, found):
        if subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version}")


def oldest_versions() -> list[str]:
    """The least version of each dependency of the core and of `OPTIONAL`, as pip wants it."""
    groups = [SETUP["options"]["install_requires"]]
    groups += [SETUP["options.extras_require"][extra] for extra in OPTIONAL]
    return [
        f"{name}=={version}.*" if version.count(".") < 2 else f"{name}=={version}"
        for name, version in re.findall(r"^([\w-]+)>=([\d.]+)", "\n".join(groups), re.MULTILINE)
    ]


# -- what is built ---------------------------------------------------------------------------------


def test_the_wheel_has_the_files_of_the_packages_and_no_others(dist, wheel):
    folders = {
        line.split(" = ")[0]: line.split(" = ")[1]
        for line in SETUP["options"]["package_dir"].strip().splitlines()
    }
    of_packages = {
        f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}"
        for package, folder in folders.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not is_of_another(path, folder, folders)
    }
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == of_packages
    with tarfile.open(only(dist.glob("*.tar.gz"))) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    assert {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"} <= names


def is_of_another(path: Path, folder: str, folders: dict[str, str]) -> bool:
    """Whether a file below a folder belongs to a package that is mapped from further below."""
    return any(
        other != folder and other.startswith(f"{folder}/") and (ROOT / other) in path.parents
        for other in folders.values()
    )


def test_the_metadata_says_what_the_registry_shows(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    assert metadata["Name"] == "marserve"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(OPTIONAL) | {"bench", "vision"} <= set(metadata.get_all("Provides-Extra") or [])
    needed = [each for each in metadata.get_all("Requires-Dist") or [] if "extra ==" not in each]
    assert not any(each.startswith(("torch", "grpcio", "pytest")) for each in needed)


# -- what is installed -----------------------------------------------------------------------------


@pytest.mark.parametrize("version", PYTHONS)
def test_a_server_installed_from_the_wheel_serves(version, install, assert_serves, tmp_path):
    """With what the core needs, in the newest versions that there are."""
    commands = install(interpreter(version))
    assert "marserve 0." in run([commands / "marserve", "--version"])
    run([commands / "python", "-c", f"import {', '.join(IMPORT_NAMES)}"], tmp_path)
    assert_serves(commands)


def test_a_server_serves_with_the_oldest_dependencies(install, assert_serves):
    versions = [*oldest_versions(), *FOR_TESTS]
    commands = install(interpreter(PYTHONS[0]), *versions, extras=f"[{','.join(OPTIONAL)}]")
    assert_serves(commands)
    folders = [ROOT / "tests" / "frontend" / name for name in NEAR_DEPENDENCIES]
    run([commands / "python", "-m", "pytest", "-q", *NO_CACHE, *WITHOUT_PROTOC, *folders], ROOT)


def test_the_demo_runs_without_torch(install, prepare_server):
    commands = install(sys.executable, "scikit-learn")
    with prepare_server() as server:
        config = server.directory / "config.properties"
        demo = [commands / "marserve", "demo", "--once", "--ts-config", config]
        done = subprocess.run(
            demo, env=server.environment, cwd=server.directory, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        server.assert_nothing_left()
    assert done.stdout.endswith(f":{server.ports['management']}/dashboard\n")


def test_authors_see_the_types(install, tmp_path):
    """A type checker reads the installed package, and finds a mistake."""
    commands = install(sys.executable, "--no-deps")
    program = tmp_path / "program.py"
    program.write_text("from marserve.backend.errors import PredictionException as E\nx: int = E\n")
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--python-executable"]
    checked = subprocess.run(
        [*mypy, commands / "python", program], capture_output=True, text=True, timeout=300
    )
    assert "Incompatible types in assignment" in checked.stdout, checked.stdout
