"""What workers of one model have in common is in memory once."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")

SIDE = 1024
WEIGHTS_KB = SIDE * SIDE * 4 // 1024
MODEL = f"""\
import torch


class Net(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__({SIDE}, {SIDE})
"""
HANDLER = f"""\
import gc, os, sys, torch
from ts.torch_handler.base_handler import BaseHandler


class Handler(BaseHandler):
    def preprocess(self, data):
        return torch.ones(len(data), {SIDE})

    def postprocess(self, outputs):
        frontend = [name for name in sys.modules if name.startswith("marserve.frontend.")]
        told = {{"pid": os.getpid(), "frozen": gc.get_freeze_count(), "frontend": frontend}}
        return [{{**told, "sum": row.sum().item()}} for row in outputs]
"""


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(preload_modules="torch") as server:
        yield server


@pytest.fixture(scope="module", params=["pth", "safetensors"])
def served(request, server, tmp_path_factory, make_archive):
    """A model with two workers that have both served; its name."""
    name = request.param
    files = tmp_path_factory.mktemp("model")
    state = torch.nn.Linear(SIDE, SIDE).state_dict()
    if name == "safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, files / f"weights.{name}")
    else:
        torch.save(state, files / f"weights.{name}")
    (files / "net.py").write_text(MODEL)
    archive = make_archive(
        server.store,
        HANDLER,
        name,
        model_file=str(files / "net.py"),
        serialized_file=str(files / f"weights.{name}"),
    )
    answer = server.register(archive, initial_workers=2)
    assert answer.status_code == 200, answer.text
    return name


def mapped(pid: int, name: str) -> dict[str, int]:
    """What the kernel says of the mapping of a file: kB by word; empty without one."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    found = re.search(rf"^[0-9a-f]+-.*/{re.escape(name)}\n((?:\w+:.*\n)+)", text, re.MULTILINE)
    rows = re.findall(r"^(\w+): +(\d+) kB$", found[1] if found else "", re.MULTILINE)
    return {word: int(number) for word, number in rows}


def test_the_weights_of_two_workers_are_the_pages_of_one_file(server, served, wait_for):
    pids = {worker["pid"] for worker in server.describe(served)["workers"]}
    wait_for(lambda: pids.discard(server.predict(served).json()["pid"]) or not pids)
    for worker in server.describe(served)["workers"]:
        pages = mapped(worker["pid"], f"weights.{served}")
        assert pages["Rss"] >= WEIGHTS_KB
        assert pages["Pss"] <= 0.6 * pages["Rss"]
        assert pages["Anonymous"] == 0  # none was copied because somebody wrote to it


def test_what_the_fork_server_imported_is_kept_from_the_collector(server, served):
    assert server.predict(served).json()["frozen"] > 10_000


def test_a_module_that_cannot_be_preloaded_costs_only_itself(
    prepare_server, tmp_path, make_archive
):
    (tmp_path / "broken.py").write_text("raise RuntimeError('made for another torch')")
    (tmp_path / "sound.py").write_text("")
    environment = {"PYTHONPATH": str(tmp_path)}
    preloaded = "broken,no_such_module,sound"
    with prepare_server(environment, preload_modules=preloaded) as server:
        server.start()
        source = """
import os, sys

def handle(data, context):
    given = [name for name in os.environ if name.startswith("MARSERVE_FORK")]
    return data and [{"loaded": "sound" in sys.modules, "given": given}]
"""
        server.install(source, "model")
        assert server.predict("model").json() == {"loaded": True, "given": []}
        server.wait_printed("broken is not preloaded: made for another torch")
        assert "no_such_module is not preloaded" not in server.console_text()
        server.stop()


def test_a_worker_carries_nothing_of_the_frontend(server, served):
    assert server.predict(served).json()["frontend"] == []


def test_weights_in_a_linked_directory_may_be_saved_anew(server, tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "handler.py").write_text(HANDLER)
    torch.save(torch.nn.Linear(SIDE, SIDE).state_dict(), tmp_path / "weights.pth")
    manifest = tmp_path / "MAR-INF" / "MANIFEST.json"
    manifest.parent.mkdir()
    manifest.write_text(
        '{"model": {"modelName": "linked", "handler": "handler.py", "modelVersion": "1.0",'
        ' "modelFile": "net.py", "serializedFile": "weights.pth"}}'
    )
    query = {"url": str(tmp_path), "initial_workers": 1}
    answer = server.management("POST", "/models", params=query)
    assert answer.status_code == 200, answer.text
    before = server.predict("linked").json()
    assert mapped(before["pid"], "weights.pth") == {}
    (tmp_path / "weights.pth").write_bytes(b"")
    assert server.predict("linked").json() == before
