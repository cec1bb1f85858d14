"""Weights that are cast when they are packed: the archives answer as if a worker had cast them."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve.tools.archiver.archiver import main

torch = pytest.importorskip("torch")

MARSERVE = Path(sys.executable).with_name("marserve")
MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.head = nn.Linear(64, 3)
        self.twin = self.head
        self.register_buffer("order", torch.arange(3))

    def forward(self, x):
        assert {each.dtype for each in self.parameters()} == {x.dtype}
        return self.twin(self.body(x))[:, self.order]
"""
HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Numbers(BaseHandler):
    def sample_input(self):
        return [0.1, 0.2, 0.3, 0.4]
"""


@pytest.fixture
def author(tmp_path, monkeypatch):
    """A directory with a model, its weights and a handler with a sample; the current one."""
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    Path("numbers_handler.py").write_text(HANDLER)
    Path("config.yaml").write_text("batchSize: 4\npt2: {compile: {backend: eager}}\n")
    names = {}
    exec(MODEL, names)
    torch.manual_seed(0)
    state = names["Net"]().state_dict()
    torch.save(state, "net.pth")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file({name: each.clone() for name, each in state.items()}, "net.safetensors")
    return tmp_path


@pytest.fixture
def pack(author):
    def run(*words, weights="net.pth", **flags):
        named = {
            "model_name": "net",
            "version": "1.0",
            "handler": "numbers_handler.py",
            "model_file": "net.py",
            "serialized_file": weights,
            "config_file": "config.yaml",
            "export_path": "store",
            **flags,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value]
        return main([*given, *words])

    return run


def unpacked() -> Path:
    with zipfile.ZipFile("store/net.mar") as archive:
        archive.extractall("unpacked")
    return Path("unpacked")


def digests() -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in Path().iterdir()
        if path.is_file()
    }


@pytest.mark.integration
@pytest.mark.parametrize(
    ("weights", "precision"), [("net.pth", "bf16"), ("net.safetensors", "fp16")]
)
def test_weights_are_cast_and_the_originals_stay(pack, capsys, weights, precision):
    before = digests()
    assert pack("--precision", precision, weights=weights) == 0
    assert digests() == before
    packed = unpacked()
    config = yaml.safe_load((packed / "config.yaml").read_text())
    assert config.pop("optimization") == {"precision": precision}
    assert config == {"batchSize": 4, "pt2": {"compile": {"backend": "eager"}}}
    if weights == "net.pth":
        cast = torch.load(packed / weights, weights_only=True)
        assert cast["head.weight"].data_ptr() == cast["twin.weight"].data_ptr()
    else:
        cast = pytest.importorskip("safetensors.torch").load_file(packed / weights)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert cast["body.0.weight"].dtype == dtype
    assert cast["order"].dtype == torch.int64
    said = capsys.readouterr().out
    assert f"{weights} in {precision}: " in said
    assert "Against the original: relative error 0.00" in said
    assert ", agreement 100.00%." in said


def answer() -> Any:
    """What a worker answers with the archive."""
    Path("in.json").write_text("[1.0, 2.0, 3.0, 4.0]")
    command = [MARSERVE, "run", "store/net.mar", "--input", "in.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.integration
@pytest.mark.parametrize("weights", ["net.pth", "net.safetensors"])
def test_it_answers_as_if_it_were_cast_while_it_loads(pack, weights):
    assert pack("--precision", "bf16", weights=weights) == 0
    packed = answer()
    Path("config.yaml").write_text("optimization: {precision: bf16}")
    assert pack("--force", weights=weights) == 0
    assert packed == answer()


@pytest.mark.integration
def test_options_that_need_fp32_find_it(pack):
    """Batch norms are folded, and accuracy is compared, in fp32."""
    options = "precision: bf16, check_accuracy: {max_relative_error: 0.05}"
    Path("config.yaml").write_text(f"optimization: {{{options}}}")
    assert pack("--precision", "bf16") == 0
    assert len(answer()) == 3


@pytest.mark.integration
def test_without_a_configuration_there_is_one_afterwards(pack):
    assert pack("--precision", "bf16", config_file="") == 0
    packed = unpacked()
    manifest = json.loads((packed / "MAR-INF" / "MANIFEST.json").read_text())
    assert manifest["model"]["configFile"] == "model-config.yaml"
    config = yaml.safe_load((packed / "model-config.yaml").read_text())
    assert config == {"optimization": {"precision": "bf16"}}


@pytest.mark.integration
def test_without_a_sample_nothing_is_compared(pack, capsys):
    assert pack("--precision", "bf16", handler="base_handler") == 0
    said = capsys.readouterr().out
    assert "was not measured: optimization.check_accuracy: there is no sample input" in said


def test_a_handler_that_does_not_read_the_section_is_named(pack, capsys):
    Path("own.py").write_text("def handle(data, context):\n    return data\n")
    assert pack("--precision", "bf16", handler="own.py") == 0
    assert "the handler does not read the section optimization" in capsys.readouterr().out


class Bomb:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: torch.save({"a": Bomb()}, "net.pth"), "it is not a plain state dict"),
        (lambda: torch.save([1, 2], "net.pth"), "it is not a state dict"),
        (
            lambda: torch.jit.script(torch.nn.Linear(4, 3)).save("net.pth"),
            "is TorchScript, whose code has fixed types",
        ),
        (
            lambda: torch.save({"a": torch.tensor([1e5])}, "net.pth"),
            "a has values beyond the range",
        ),
        (lambda: Path("net.pth").write_text("nothing"), "it is not a plain state dict"),
        (
            lambda: Path("config.yaml").write_text("optimization: {precision: bf16}"),
            "--precision fp16 contradicts optimization.precision of config.yaml, 'bf16'",
        ),
        (
            lambda: Path("config.yaml").write_text("optimization: {cast: matmul}"),
            "--precision casts all weights; optimization.cast: matmul",
        ),
        (lambda: Path("config.yaml").write_text("- 1"), "config.yaml is not a mapping"),
        (lambda: Path("config.yaml").write_text("a: ["), "config.yaml is not YAML"),
        (lambda: Path("config.yaml").write_text("a: !!bool x"), "config.yaml is not YAML"),
        (lambda: Path("config.yaml").write_text(f"a: {'9' * 5000}"), "config.yaml is not YAML"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_what_cannot_be_cast_is_refused(pack, capsys, make, sentence):
    make()
    assert pack("--precision", "fp16") == 1
    assert sentence in capsys.readouterr().err
    assert not Path("store/net.mar").exists()
    assert not Path("exploded").exists()


def test_damaged_safetensors_are_refused(pack, capsys):
    Path("net.safetensors").write_bytes(b"nothing")
    assert pack("--precision", "bf16", weights="net.safetensors") == 1
    assert "net.safetensors cannot be cast" in capsys.readouterr().err


def test_an_original_in_the_place_of_the_archive_is_not_replaced(pack, author, capsys):
    (author / "store" / "net").mkdir(parents=True)
    original = Path("store/net/net.pth")
    original.write_bytes(Path("net.pth").read_bytes())
    before = original.read_bytes()
    words = ("--precision", "bf16", "--archive-format", "no-archive", "--force")
    assert pack(*words, weights=str(original)) == 1
    assert "store/net/net.pth would be overwritten" in capsys.readouterr().err
    assert original.read_bytes() == before


def test_code_that_was_saved_with_its_weights_is_refused(pack, capsys):
    assert pack("--precision", "bf16", model_file="") == 1
    assert "--precision needs a state dict" in capsys.readouterr().err
