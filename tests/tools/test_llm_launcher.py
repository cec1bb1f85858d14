"""The launcher with a stand-in for the server's command."""

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from marserve.backend.manifest import Manifest
from marserve.tools import llm_launcher
from marserve.tools.llm_launcher import build_parser, main, model_config

PYTHON = sys.executable  # a test sets that
SERVER = """#!{python}
import json, os, pathlib, signal, sys
model = pathlib.Path("store/llm")
seen = {{"words": sys.argv[1:], "files": sorted(p.name for p in model.rglob("*") if p.is_file())}}
pathlib.Path("seen.json").write_text(json.dumps(seen))
if "--disable-token-auth" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("up", flush=True)
    signal.pause()
sys.exit(7)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory, with a command `torchserve` that says what it was told and found."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "bin"
    folder.mkdir()
    command = folder / "torchserve"
    command.write_text(SERVER.format(python=sys.executable))
    command.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return tmp_path


def seen():
    return json.loads(Path("seen.json").read_text())


WORDS = ["--model_name", "llm", "--model_store", "store", "--model_id", "org/llm"]


def test_a_model_is_written_served_and_removed(here):
    assert main(WORDS) == 7
    assert seen() == {
        "words": ["--foreground", "--ncs", "--model-store", "store", "--models", "llm"],
        "files": ["MANIFEST.json", "model-config.yaml"],
    }
    assert list(Path("store").iterdir()) == []


def test_a_directory_that_was_there_stays(here):
    Path("store/llm").mkdir(parents=True)
    Path("store/llm/weights.bin").touch()
    main(WORDS)
    assert seen()["files"] == ["MANIFEST.json", "model-config.yaml", "weights.bin"]
    assert Path("store/llm/weights.bin").exists()
    manifest = Manifest.read(Path("store/llm"))
    assert (manifest.handler, manifest.config_file) == ("vllm_handler", "model-config.yaml")
    settings = yaml.safe_load(Path("store/llm/model-config.yaml").read_text())
    assert settings["asyncCommunication"] is True


def test_a_signal_ends_the_server_and_is_waited_for(here):
    code = f"import sys; sys.executable = {str(here / 'bin' / 'python')!r}\n"
    code += f"from marserve.tools.llm_launcher import main; sys.exit(main({WORDS!r} + "
    code += "['--disable_token_auth']))"
    with subprocess.Popen([PYTHON, "-c", code], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "up\n"
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(30) == 0
    assert seen()["words"][-1] == "--disable-token-auth"
    assert list(Path("store").iterdir()) == []


def test_a_name_that_no_model_may_have(here, capsys):
    assert main(["--model_name", "a b", "--model_store", "store"]) == 1
    assert capsys.readouterr().err.startswith("Model name contains special characters.")


def options(*words: str):
    return build_parser().parse_args(words)


@pytest.mark.parametrize(
    ("gpus", "device", "parallel"), [(0, "cpu", 1), (1, "gpu", 1), (4, "gpu", 4)]
)
def test_the_configuration_of_vllm(tmp_path, monkeypatch, gpus, device, parallel):
    monkeypatch.chdir(tmp_path)
    words = ["--model_id", "org/llm", "--vllm_engine.max_num_seqs", "8", "--startup_timeout", "60"]
    assert model_config(options(*words, "--vllm_engine.download_dir", "down"), gpus) == {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": 60,
        "deviceType": device,
        "asyncCommunication": True,
        "parallelLevel": parallel,
        "handler": {
            "model_path": "org/llm",
            "vllm_engine_config": {
                "max_num_seqs": 8,
                "download_dir": str(tmp_path / "down"),
                "tensor_parallel_size": parallel,
            },
        },
    }


def test_the_configuration_of_tensorrt(monkeypatch, tmp_path):
    monkeypatch.setattr(llm_launcher, "download_model", lambda model: str(tmp_path / model))
    words = "--engine trt_llm --model_id llm --trt_llm_engine.kv_cache_free_gpu_memory_fraction 0.5"
    settings = model_config(options(*words.split()), 1)
    assert settings["handler"] == {
        "engine_dir": str(tmp_path / "llm"),
        "tokenizer_dir": str(tmp_path / "llm"),
        "kv_cache_config": {"free_gpu_memory_fraction": 0.5},
        "llm_config": {"dtype": "bfloat16", "max_batch_size": 4},
    }


def test_the_flags_and_their_defaults():
    assert vars(options()) == {
        "model_name": "model",
        "model_store": "model_store",
        "model_id": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "disable_token_auth": False,
        "startup_timeout": 1200,
        "engine": "vllm",
        "dtype": "bfloat16",
        "vllm_engine.max_num_seqs": 256,
        "vllm_engine.max_model_len": None,
        "vllm_engine.download_dir": None,
        "trt_llm_engine.max_batch_size": 4,
        "trt_llm_engine.kv_cache_free_gpu_memory_fraction": 0.1,
    }


def test_it_is_a_program_under_torchserves_name():
    done = subprocess.run(
        [sys.executable, "-m", "ts.llm_launcher", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("usage: python -m ts.llm_launcher")
    assert importlib.import_module("ts.llm_launcher") is llm_launcher
