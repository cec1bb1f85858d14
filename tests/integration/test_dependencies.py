"""Models that bring packages of their own: real pip, real virtual environments, no network."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

pytestmark = [pytest.mark.integration, pytest.mark.environments]

SECONDS = 90.0
PROGRAM = Path(sys.executable).with_name("marserve")

HANDLER = """
import sys

def handle(data, context):
    import tiny
    if data is not None:
        return [[tiny.__version__, tiny.__file__, sys.executable] for _ in data]
"""


def make_wheel(folder: Path, version: str) -> Path:
    """A wheel of the package ``tiny``, which knows its version."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny-{version}-py3-none-any.whl"
    info = f"tiny-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny.py", f"__version__ = {version!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


class Machine:
    """A server that installs requirements, and archives that have some."""

    def __init__(self, server: Any, make_archive: Callable[..., Path], work: Path) -> None:
        self.server, self.cache = server, work / "cache"
        self._make_archive, self._work = make_archive, work

    def pack(
        self, name: str, requirements: str, *wheels: Path, config: str = "", **extra: str
    ) -> Path:
        """An archive with these requirements and these wheels in it."""
        folder = self._work / f"of-{name}"
        folder.mkdir(exist_ok=True)
        (folder / "requirements.txt").write_text(requirements)
        for file, text in extra.items():
            (folder / f"{file}.txt").write_text(text)
        files = [*wheels, *(folder / f"{file}.txt" for file in extra)]
        return self._make_archive(
            self.server.store,
            HANDLER,
            name,
            config,
            requirements_file=str(folder / "requirements.txt"),
            **({"extra_files": ",".join(map(str, files))} if files else {}),
        )

    def register(self, archive: Path, **query: Any) -> requests.Response:
        parameters = {"url": archive.name, "initial_workers": 1, **query}
        answer: requests.Response = self.server.management(
            "POST", "/models", params=parameters, timeout=SECONDS
        )
        return answer

    def serve(self, name: str, requirements: str, *wheels: Path, **options: Any) -> list[str]:
        """Register a model and ask it: version and place of its package, and its interpreter."""
        answer = self.register(self.pack(name, requirements, *wheels, **options))
        assert answer.status_code == 200, answer.text
        return list(self.server.predict(name, data=b"x").json())

    def installed(self) -> set[str]:
        """The installations there are."""
        return {path.parent.name for path in self.cache.glob("*/complete")}

    def left_behind(self) -> list[str]:
        """What lies in the cache, but for installations and locks."""
        there = {path.name for path in self.cache.iterdir() if path.suffix != ".lock"}
        return sorted(there - self.installed())


@pytest.fixture(scope="module")
def machine(start_server, make_archive, tmp_path_factory):
    work = tmp_path_factory.mktemp("dependencies")
    with start_server(
        install_py_dep_per_model="true", dependency_cache=str(work / "cache")
    ) as server:
        yield Machine(server, make_archive, work)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Versions 1.0 and 2.0 of the same package."""
    folder = tmp_path_factory.mktemp("wheels")
    return make_wheel(folder, "1.0"), make_wheel(folder, "2.0")


def test_two_models_have_different_versions_of_the_same_package(machine, wheels):
    for wheel, name in zip(wheels, ("first", "second"), strict=True):
        version, place, _ = machine.serve(name, f"--no-index\n./{wheel.name}\n", wheel)
        assert wheel.name == f"tiny-{version}-py3-none-any.whl"
        assert Path(place).is_relative_to(machine.cache)
    assert machine.server.predict("first", data=b"x").json()[0] == "1.0"
    assert machine.server.predict("second", data=b"x").json()[0] == "2.0"
    machine.server.wait_logged("model_log.log", "Successfully installed tiny-1.0")


OTHER_PLACES = {
    "user": "true",
    "prefix": "/nowhere",
    "root": "/nowhere",
    "target": "/nowhere",
    "dry-run": "true",
    "require-virtualenv": "true",
}


@pytest.mark.parametrize("is_file", [True, False])
def test_packages_are_installed_for_the_model_whatever_pips_configuration_says(
    is_file, prepare_server, make_archive, wheels, tmp_path
):
    lines = [f"{name} = {value}" for name, value in OTHER_PLACES.items()]
    (tmp_path / "pip.conf").write_text("\n".join(["[install]", *lines]))
    environment = {
        f"PIP_{name.upper().replace('-', '_')}": value for name, value in OTHER_PLACES.items()
    }
    if is_file:
        environment = {"PIP_CONFIG_FILE": str(tmp_path / "pip.conf")}
    settings = {"install_py_dep_per_model": "true", "dependency_cache": str(tmp_path / "cache")}
    with prepare_server(environment, **settings) as server:
        server.start()
        machine = Machine(server, make_archive, tmp_path)
        wheel = wheels[0]
        for name, config in (("own", ""), ("venv", "useVenv: true\n")):
            text = f"--no-index\n./{wheel.name}\n"
            version, place, _ = machine.serve(name, text, wheel, config=config)
            assert version == "1.0"
            assert Path(place).is_relative_to(machine.cache)


def test_the_same_requirements_are_installed_once(machine, wheels, together):
    before = machine.installed()
    text = "--no-index\n--find-links .\ntiny\n# once\n"
    archives = [machine.pack(f"once{number}", text, *wheels) for number in range(3)]
    answers = together([lambda archive=archive: machine.register(archive) for archive in archives])
    assert [answer.status_code for answer in answers] == [200] * 3
    places = {tuple(machine.server.predict(f"once{n}", data=b"").json()[:2]) for n in range(3)}
    assert {version for version, _ in places} == {"2.0"}
    assert len(places) == 1
    assert len(machine.installed() - before) == 1


def test_a_wheel_of_the_same_name_with_another_content_is_another_package(machine, tmp_path):
    requirements = "--no-index\n-r more.txt\n"
    places = set()
    for number in (1, 2):
        wheel = make_wheel(tmp_path / str(number), "3.0")
        with zipfile.ZipFile(wheel, "a") as changed:
            changed.writestr(f"tiny_{number}.py", "")
        answer = machine.serve(f"same{number}", requirements, wheel, more=f"./{wheel.name}\n")
        places.add(answer[1])
    assert len(places) == 2


def test_a_virtual_environment_sees_the_servers_packages_behind_its_own(machine, wheels):
    requirements = f"--no-index\n./{wheels[0].name}\nrequests\n"  # the server has requests
    answer = machine.serve("venv", requirements, wheels[0], config="useVenv: true\n")
    assert answer[0] == "1.0"
    assert Path(answer[2]).is_relative_to(machine.cache)
    described = machine.server.describe("venv")
    assert described["useVenv"] is True


@pytest.mark.parametrize("config", ["", "useVenv: true\n"], ids=["directory", "venv"])
def test_requirements_that_cannot_be_met_are_the_clients_fault_and_leave_nothing(config, machine):
    unpacked, name = machine.server.unpacked(), "unmet" + str(len(config))
    answer = machine.register(machine.pack(name, "--no-index\nnot-there==9\n", config=config))
    assert answer.status_code == 400
    error = answer.json()
    assert error["type"] == "ModelException"
    assert error["message"] == (
        f"Custom pip package installation failed for model {name}. "
        "ERROR: No matching distribution found for not-there==9"
    )
    assert not machine.server.is_known(name)
    assert machine.server.unpacked() == unpacked
    assert machine.left_behind() == []


def test_a_requirements_file_that_is_not_there_is_refused(machine, wheels):
    archive = machine.pack("gone", "tiny")
    with zipfile.ZipFile(archive) as old:
        kept = {name: old.read(name) for name in old.namelist() if "requirements" not in name}
    with zipfile.ZipFile(archive, "w") as new:
        for member, content in kept.items():
            new.writestr(member, content)
    answer = machine.register(archive)
    assert answer.status_code == 400
    assert "requirements.txt" in answer.json()["message"]


def test_requirements_are_left_alone_where_the_server_does_not_install(
    start_server, make_archive, tmp_path
):
    with start_server(dependency_cache=str(tmp_path / "cache")) as server:
        machine = Machine(server, make_archive, tmp_path)
        answer = machine.register(machine.pack("alone", "not-there==9\n"))
        assert answer.status_code == 500
        assert "No module named 'tiny'" in answer.json()["message"]
        assert not machine.cache.exists()


SLOW = """
import os
from setuptools import setup
open(os.environ["GATE"]).read()
setup(name="slow", version="1.0", py_modules=[])
"""


def test_an_installation_ends_with_the_server_and_the_next_one_starts_afresh(
    prepare_server, make_archive, tmp_path, gate, background
):
    environment = {"GATE": gate.path, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1"}
    cache = tmp_path / "cache"
    with prepare_server(
        environment, install_py_dep_per_model="true", dependency_cache=str(cache)
    ) as server:
        server.start()
        machine = Machine(server, make_archive, tmp_path)
        source = tmp_path / "slow"
        source.mkdir()
        (source / "setup.py").write_text(SLOW)
        archive = machine.pack("slow", f"{source}\n")
        registering = background(machine.register, archive)
        gate.wait_entered()
        server.stop(signal.SIGTERM)
        answer = registering.result(SECONDS)
        assert answer.status_code == 503
        assert machine.left_behind() == []


def test_what_a_killed_server_left_is_installed_again(
    prepare_server, make_archive, tmp_path, wheels
):
    with prepare_server(
        install_py_dep_per_model="true", dependency_cache=str(tmp_path / "cache")
    ) as server:
        server.start()
        machine = Machine(server, make_archive, tmp_path)
        requirements = f"--no-index\n./{wheels[0].name}\n"
        assert machine.serve("one", requirements, wheels[0])[0] == "1.0"
        (home,) = machine.cache.glob("*/complete")
        home.unlink()  # as if it had been killed just before the end
        (home.parent / "packages" / "tiny.py").write_text("__version__ = 'half'\n")
        assert machine.serve("two", requirements, wheels[0])[0] == "1.0"


# -- another interpreter ---------------------------------------------------------------------------


def test_an_interpreter_without_marserve_is_refused_when_it_is_needed(
    start_server, make_archive, tmp_path
):
    bare = tmp_path / "python"
    bare.write_text(
        "#!/bin/sh\necho \"ModuleNotFoundError: No module named 'marserve'\" >&2; exit 1"
    )
    bare.chmod(0o700)
    with start_server(python=str(bare)) as server:
        archive = make_archive(server.store, HANDLER, "foreign")
        answer = server.register(archive, initial_workers=1)
        assert answer.status_code == 500
        assert answer.json()["message"].endswith(
            f"The interpreter {bare} cannot run workers: "
            "ModuleNotFoundError: No module named 'marserve'"
        )


WHO = """
import os, sys

def handle(data, context):
    if data is not None:
        own = os.environ.get("KEPT_BACK"), open("/proc/self/environ").read()
        return [[sys.executable, sys.argv[1:], "KEPT_BACK" in str(own), len(sys.path[0])]]
"""


def test_workers_of_another_interpreter_serve_and_know_no_withheld_variable(
    prepare_server, make_archive, tmp_path
):
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(Path(os.sys.executable))
    (tmp_path / "pyvenv.cfg").write_text((Path(os.sys.prefix) / "pyvenv.cfg").read_text())
    (tmp_path / "lib").symlink_to(Path(os.sys.prefix) / "lib")
    with prepare_server(
        {"KEPT_BACK": "secret"}, python=str(link), blacklist_env_vars="KEPT_.*"
    ) as server:
        server.start()
        server.install(WHO, "who")
        python, arguments, knows, _ = server.predict("who", data=b"x").json()
        assert python == str(link)
        assert arguments == []
        assert knows is False
        worker = psutil.Process(server.worker("who")["pid"])
        assert worker.cwd().startswith(str(server.temp))
        server.stop()


@pytest.mark.parametrize("config", ["", "useVenv: true\n"])
def test_marserve_run_installs_requirements_as_the_server_does(machine, wheels, tmp_path, config):
    name = f"run{len(config)}"
    archive = machine.pack(name, f"--no-index\n./{wheels[0].name}\n", wheels[0], config=config)
    (tmp_path / "input").write_text("x")
    settings = machine.server.directory / "config.properties"
    command = [PROGRAM, "run", archive, "--ts-config", settings, "--input", "input"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    version, place, _ = json.loads(done.stdout)
    assert version == "1.0"
    assert Path(place).is_relative_to(machine.cache)
