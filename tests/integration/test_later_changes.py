"""Changes of a model while an earlier one still waits: for a load that hangs, or for files."""

import time
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

AT_ONCE = 5.0  # seconds, of the 120 that a load may take


@pytest.fixture
def hang(server, make_archive, make_gate, background, request):
    """Register a model whose workers wait in initialize; its name, its gate, the answer to be."""

    def register(**query):
        gate = make_gate()
        name = f"hangs_{abs(hash(request.node.name))}"
        source = f"""
import contextlib
def handle(data, context):
    if data is None:
        with contextlib.suppress(FileNotFoundError):
            open({gate.path!r}).read()
        return
    return ["loaded"] * len(data)
"""
        archive = make_archive(server.store, source, name)
        answer = background(server.register, archive, **{"initial_workers": 1, **query})
        gate.wait_entered()
        return name, gate, answer

    return register


def release(gate):
    """Let those load who wait, and those who come."""
    Path(gate.path).unlink()
    gate.open()


def at_once(server, method, path):
    """An answer that waits for nobody."""
    began = time.monotonic()
    answer = server.management(method, path)
    assert time.monotonic() - began < AT_ONCE
    return answer


def error_of(answer):
    """Status, type and sentence of an answer."""
    document = answer.result().json()
    return answer.result().status_code, document.get("type"), document.get("message")


def test_a_model_is_unregistered_while_its_load_hangs(server, hang):
    name, _, registration = hang()
    assert at_once(server, "DELETE", f"/models/{name}").status_code == 200
    sentence = f"A later request unregistered model {name} version 1.0."
    assert error_of(registration) == (409, "ConflictStatusException", sentence)
    assert not server.is_known(name)
    assert server.register(f"{name}.mar", initial_workers=0).status_code == 200
    assert server.management("DELETE", f"/models/{name}").status_code == 200


@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_is_scaled_while_its_load_hangs(server, hang, wait_for, workers):
    name, gate, registration = hang()
    assert at_once(server, "PUT", f"/models/{name}?min_worker={workers}").status_code == 202
    sentence = (
        f"A later request changed the workers of model {name} version 1.0, which stays "
        f"registered: min_worker={workers}, max_worker={workers}."
    )
    assert error_of(registration) == (409, "ConflictStatusException", sentence)
    assert server.describe(name)["minWorkers"] == workers
    release(gate)
    server.wait_workers(name, *["READY"] * workers)
    wait_for(lambda: server.predict(name).status_code == (200 if workers else 503))
    assert server.management("DELETE", f"/models/{name}").status_code == 200


def test_the_batch_size_of_a_model_is_changed_while_its_load_hangs(server, hang):
    name, gate, registration = hang()
    assert at_once(server, "PUT", f"/models/{name}?batch_size=3").status_code == 200
    release(gate)
    assert registration.result().status_code == 200
    assert server.describe(name)["batchSize"] == 3


def test_another_version_is_served_while_a_load_hangs(server, hang, make_archive):
    name, _, registration = hang()
    source = "def handle(data, context):\n    return data and ['second'] * len(data)\n"
    second = make_archive(server.store, source, f"{name}_2", version="2.0")
    assert server.register(second, model_name=name, initial_workers=1).status_code == 200
    assert at_once(server, "PUT", f"/models/{name}/2.0/set-default").status_code == 200
    assert server.predict(name).text == "second"
    assert at_once(server, "DELETE", f"/models/{name}/1.0").status_code == 200
    assert error_of(registration)[0] == 409


def test_a_registration_that_fails_leaves_the_version_that_came_later(
    server, make_archive, make_gate, background
):
    gate, name = make_gate(), "fails_late"
    source = f"def handle(data, context):\n    open({gate.path!r}).read()\n    raise ValueError\n"
    first = make_archive(server.store, source, name)
    registration = background(server.register, first, initial_workers=1)
    gate.wait_entered()
    source = "def handle(data, context):\n    return data and ['second'] * len(data)\n"
    second = make_archive(server.store, source, f"{name}_2", version="2.0")
    assert server.register(second, model_name=name, initial_workers=1).status_code == 200
    gate.open()
    assert error_of(registration)[0] == 500
    assert server.predict(name).text == "second"
    assert [
        each["modelVersion"] for each in server.management("GET", f"/models/{name}/all").json()
    ] == ["2.0"]


def test_of_two_orders_for_workers_the_later_wins(server, hang, background):
    name, gate, registration = hang(synchronous="false")
    assert registration.result().status_code == 202
    path = f"/models/{name}?synchronous=true&min_worker="
    first = background(server.management, "PUT", f"{path}3")
    server.wait_workers(name, *["UNLOADING"] * 3)
    second = background(server.management, "PUT", f"{path}1")
    assert error_of(first)[0] == 409
    release(gate)
    assert second.result().status_code == 200
    server.wait_workers(name, "READY")


def test_an_order_waits_for_workers_that_an_earlier_one_has_started(server, hang, background):
    name, gate, registration = hang(synchronous="false")
    assert registration.result().status_code == 202
    scaling = background(
        server.management, "PUT", f"/models/{name}?synchronous=true&min_worker=1&max_worker=5"
    )
    release(gate)
    assert scaling.result().status_code == 200
    assert [worker["status"] for worker in server.describe(name)["workers"]] == ["READY"]


def test_stopping_while_the_files_of_a_model_are_removed(start_server, background, wait_for):
    with start_server() as server:
        with zipfile.ZipFile(server.store / "many.mar", "w") as archive:
            archive.writestr("handler.py", "def handle(data, context):\n    return data\n")
            archive.writestr(
                "MAR-INF/MANIFEST.json",
                '{"model": {"modelName": "many", "modelVersion": "1", "handler": "handler.py"}}',
            )
            for number in range(30_000):
                archive.writestr(f"files/{number}", b"")
        assert server.register("many.mar").status_code == 200
        (name,) = server.unpacked()
        (folder,) = server.temp.glob(f"marserve-*/models/{name}/files")
        links = folder.stat().st_mtime_ns
        leaving = background(server.management, "DELETE", "/models/many")
        wait_for(lambda: not folder.exists() or folder.stat().st_mtime_ns != links)
        server.stop()
        leaving.exception()
        assert "Traceback" not in server.console_text()
