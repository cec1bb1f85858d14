"""What a forked worker must not share: random numbers, and modules of an archive's names."""

import os
import signal

import pytest

pytestmark = pytest.mark.integration

# The state is that at the import, before anything draws from it.
DRAWS = """
import json, multiprocessing, os, random
import numpy, sympy.core.random, torch
import generator_of_a_library

DRAWN = {
    "numpy": numpy.random.rand(),
    "numpy's new generator": generator_of_a_library.new.random(),
    "torch": torch.rand(1).item(),
    "torch's seed": torch.initial_seed(),
    "python": random.random(),
    "sympy": sympy.core.random.rng.random(),
    "a library": generator_of_a_library.own.random(),
    "multiprocessing": multiprocessing.current_process().authkey.hex(),
}

def handle(data, context):
    return data and [json.dumps([os.getpid(), DRAWN])] * len(data)
"""
LIBRARY = """
import random
import numpy

own = random.Random()
new = numpy.random.default_rng()
"""
NAMES = """
import json
{imports}

def handle(data, context):
    found = [getattr(each, "OWNER", "python") for each in ({names})]
    return data and [json.dumps(found)] * len(data)
"""
OWN = "OWNER = 'archive'\n"
DIES = """
import os, secrets

def handle(data, context):
    if data and data[0]["body"] == b"die":
        os._exit(3)
    return data and [secrets.OWNER] * len(data)
"""


@pytest.fixture(scope="module")
def server(prepare_server, tmp_path_factory):
    pytest.importorskip("torchvision")
    folder = tmp_path_factory.mktemp("library")
    (folder / "generator_of_a_library.py").write_text(LIBRARY)
    preloaded = "torch,torchvision,sympy,generator_of_a_library"
    with prepare_server({"PYTHONPATH": str(folder)}, preload_modules=preloaded) as server:
        server.start()
        yield server


def test_no_worker_draws_the_random_numbers_of_another(server, wait_for):
    server.install(DRAWS, "one")
    server.install(DRAWS, "two")
    pid, first = server.predict("one", data=b"1").json()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: server.worker("one")["pid"] not in (0, None, pid))
    server.wait_workers("one", "READY")
    _, successor = server.predict("one", data=b"1").json()
    _, other = server.predict("two", data=b"1").json()
    for name in first:
        assert len({first[name], successor[name], other[name]}) == 3, name


@pytest.fixture
def imports(server, make_archive, tmp_path, request):
    """Register a model that has modules and imports names; return whose modules it gets."""

    def register(names, files):
        own = tmp_path / "own"
        for file in files:
            (own / file).parent.mkdir(parents=True, exist_ok=True)
            (own / file).write_text(OWN)
        handler = tmp_path / "names_of_modules.py"
        handler.write_text(
            NAMES.format(imports=f"import {', '.join(names)}", names=", ".join(names))
        )
        model = request.node.name.partition("[")[0]
        archive = make_archive(server.store, handler, model, extra_files=str(own))
        answer = server.register(archive, initial_workers=1)
        assert answer.status_code == 200, answer.text
        return server.predict(model, data=b"1").json()

    return register


def test_an_archive_with_the_names_of_preloaded_modules_gets_its_own(server, imports):
    names = ["statistics", "profile", "secrets", "html", "fractions", "sympy", "decimal"]
    files = [f"{name}.py" for name in names if name != "profile"]
    assert imports(names, [*files, "profile/__init__.py"]) == ["archive"] * len(names)
    server.wait_logged("model_log.log", "an interpreter of its own, since the model has modules")


def test_what_the_worker_of_torchserve_has_imported_is_not_found_in_an_archive(server, imports):
    server.skip_logs()
    names = ["json", "calendar", "yaml"]
    assert imports(names, [f"{name}.py" for name in names]) == ["python"] * 3
    server.wait_logged("model_log.log", "of the model are not imported: calendar, json, yaml.")


def test_in_an_interpreter_of_its_own_a_worker_finds_the_same(server, imports):
    server.skip_logs()
    names = ["json", "calendar", "numpy", "statistics"]
    found = imports(names, [f"{name}.py" for name in names])
    assert found == ["python"] * 3 + ["archive"]
    server.wait_logged("model_log.log", "of the model are not imported: calendar, json, numpy.")


def test_a_folder_that_is_no_package_hides_no_module(server, imports):
    server.skip_logs()
    assert imports(["html", "profile"], ["html/page.txt", "profile.txt"]) == ["python"] * 2
    assert "are not imported" not in server.log("model_log.log")


def test_a_worker_in_an_interpreter_of_its_own_is_replaced_and_ends_with_the_server(
    start_server, make_archive, tmp_path
):
    (tmp_path / "secrets.py").write_text(OWN)
    with start_server() as server:
        archive = make_archive(server.store, DIES, "dies", extra_files=str(tmp_path / "secrets.py"))
        assert server.register(archive, initial_workers=1).status_code == 200
        answer = server.predict("dies", data=b"die")
        assert answer.status_code == 500
        assert "exit status 3" in answer.text
        server.wait_workers("dies", "READY")
        assert server.predict("dies", data=b"1").text == "archive"
