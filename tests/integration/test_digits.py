"""examples/digits: the server says what the network says offline, image by image."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration

DIGITS = Path(__file__).resolve().parents[2] / "examples" / "digits"


@pytest.fixture(scope="module")
def evaluate():
    spec = importlib.util.spec_from_file_location("evaluate_digits", DIGITS / "evaluate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def server(start_server, tmp_path_factory):
    # torch makes this folder when torchvision is imported; left to itself, in the server's TMPDIR.
    cache = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor"))}
    with start_server(environment=cache, preload_modules="torch") as started:
        yield started


@pytest.fixture(scope="module")
def trained(server, tmp_path_factory):
    """Where train.py wrote; its archives are in the server's store."""
    folder = tmp_path_factory.mktemp("digits")
    done = run_program("train.py", "--build-dir", folder, "--model-store", server.store)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def run_program(name: str, *options: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, DIGITS / name, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("batch_size", [1, 16])
@pytest.mark.parametrize("archive", ["digits-eager", "digits-script"])
def test_served_predictions_are_the_offline_ones(server, evaluate, trained, archive, batch_size):
    held_out = evaluate.HeldOut.read(trained)
    inference, management = urls(server)
    with evaluate.registered(management, archive, batch_size) as model:
        url = f"{inference}/predictions/{model}"
        served = evaluate.classify(url, held_out.images, clients=batch_size)
        batches, requests = batches_of(server, model)
        [worker] = server.describe(model)["workers"]
    assert "failed" not in worker["torch"]["threadsWhy"]
    assert served == held_out.offline
    assert held_out.accuracy(served) == held_out.accuracy(held_out.offline) >= 0.97
    assert requests == len(held_out.images) >= 360
    assert batches == requests if batch_size == 1 else batches < requests / 4


def urls(server: Any) -> tuple[str, str]:
    """Where predictions are asked for, and where models are registered."""
    local, ports = "http://127.0.0.1", server.ports
    return f"{local}:{ports['inference']}", f"{local}:{ports['management']}"


def batches_of(server: Any, model: str) -> tuple[float, float]:
    """How many batches of a model the server counted, and how many requests in them."""
    names = ("marserve_batch_size_count", "marserve_batch_size_sum")
    samples = server.metrics(*names)
    batches, requests = (
        value
        for name in names
        for series, value in samples.items()
        if series.startswith(name) and f'model_name="{model}"' in series
    )
    return batches, requests


def test_one_wrong_prediction_is_noticed(server, trained, tmp_path):
    shutil.copytree(trained / "held_out", tmp_path / "held_out")
    truth = json.loads((trained / "held_out.json").read_text())
    truth["offline"][-1] = (truth["offline"][-1] + 1) % 10
    (tmp_path / "held_out.json").write_text(json.dumps(truth))
    inference, management = urls(server)
    done = run_program(
        "evaluate.py", "--build-dir", tmp_path, "--inference", inference, "--management", management
    )
    assert done.returncode == 1
    assert done.stdout.count("NOT the offline predictions") == 4, done.stdout + done.stderr
