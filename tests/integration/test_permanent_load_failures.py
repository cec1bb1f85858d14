"""Handlers that no other try would load: told once, with the reason."""

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("name", "source", "reason"),
    [
        ("syntax", "def handle(data, context:\n", "SyntaxError: "),
        ("dependency", "import no_such_package\n", "ModuleNotFoundError: No module named 'no_such"),
        ("shape", "class A: pass\nclass B: pass\n", "HandlerUnusable: Expected only one class"),
    ],
)
def test_a_mistake_in_the_handler_is_not_tried_again(
    server, make_archive, wait_for, name, source, reason
):
    archive = make_archive(server.store, source, name)
    assert server.register(archive, initial_workers=1, synchronous="false").status_code == 202
    wait_for(lambda: server.worker(name).get("lastError"))
    assert server.worker(name)["lastError"].startswith(reason)
    server.wait_logged("ts_log.log", "is given up: another try would not help.")
    server.wait_logged("ts_log.log", f"{name}_1.0: {reason}")
    assert server.worker(name)["state"] == "FAILED"
    (given_up,) = server.metrics("marserve_given_up_workers").values()
    assert given_up == 1
    answer = server.predict(name)
    assert answer.status_code == 503
    assert f". Its worker has failed: {reason}" in answer.json()["message"]
    assert server.inference("GET", "/ping").status_code == 500
    server.management("DELETE", f"/models/{name}")
    assert server.inference("GET", "/ping").status_code == 200


def test_who_works_in_a_linked_directory_may_mend_it(server, tmp_path, wait_for):
    directory = tmp_path / "linked"
    directory.mkdir()
    (directory / "handler.py").write_text("import no_such_package\n")
    answer = server.management(
        "POST",
        "/models",
        params={
            "url": str(directory),
            "handler": "handler.py",
            "model_name": "linked",
            "initial_workers": 1,
            "synchronous": "false",
            "runtime": "python",
        },
    )
    assert answer.status_code == 202
    wait_for(lambda: server.worker("linked").get("lastError"))
    (directory / "handler.py").write_text("def handle(data, context):\n    return ['mended']\n")
    server.wait_workers("linked", "READY")
    assert server.predict("linked").content == b"mended"


def test_a_model_that_has_not_been_loaded_refuses_at_once_and_says_what_it_waits_for(
    server, make_archive, background, gate, wait_for
):
    source = (
        "from pathlib import Path\n"
        "def handle(data, context):\n"
        f"    print('weights are missing', Path({gate.path!r}).read_text())\n"
        "    raise OSError('no weights')\n"
    )
    archive = make_archive(server.store, source, "hopeless")
    assert server.register(archive, initial_workers=1, synchronous="false").status_code == 202
    gate.wait_entered()
    worker = server.worker("hopeless")
    assert (worker["status"], worker["state"]) == ("UNLOADING", "LOADING")
    early = background(server.predict, "hopeless")
    server.wait_queued("hopeless", 1)
    gate.open()
    answers = [early.result(), server.predict("hopeless")]
    assert [item.status_code for item in answers] == [503, 503]
    for answer in answers:
        assert answer.json()["message"].endswith("Its worker has failed: OSError: no weights")
    worker = server.worker("hopeless")
    assert worker["lastError"] == "OSError: no weights"
    assert "weights are missing " in worker["lastErrorOutput"]
    gate.open()  # where the second try stands
    assert server.management("DELETE", "/models/hopeless").status_code == 200


def test_a_failure_that_may_pass_is_tried_again(server, make_archive, tmp_path):
    flag = tmp_path / "flag"
    source = (
        "from pathlib import Path\n"
        "def handle(data, context):\n"
        f"    if not Path({str(flag)!r}).exists():\n"
        f"        Path({str(flag)!r}).touch()\n"
        "        raise OSError('not yet')\n"
        "    return ['there']\n"
    )
    archive = make_archive(server.store, source, "later")
    assert server.register(archive, initial_workers=1, synchronous="false").status_code == 202
    server.wait_workers("later", "READY")
    assert server.predict("later").content == b"there"
