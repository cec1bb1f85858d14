"""A stand-in for DeepSpeed; the real library was never run with these."""

import json
import sys
import types

import pytest

from marserve.handlers.engines.deepspeed import BaseDeepSpeedHandler, get_ds_engine


@pytest.fixture
def deepspeed(monkeypatch):
    module = types.ModuleType("deepspeed")
    module.init_inference = lambda model, **options: (model, options)
    monkeypatch.setitem(sys.modules, "deepspeed", module)


@pytest.fixture
def weights(tmp_path):
    for name in ("model/b.bin", "model/deep/a.pt", "model/readme.txt", "ds.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_the_arguments_of_deepspeed(deepspeed, weights, tmp_path, make_context):
    yaml = {
        "handler": {"model_path": "model"},
        "deepspeed": {"config": "ds.json", "checkpoint": "list.json"},
    }
    model, options = get_ds_engine("the model", make_context(yaml=yaml))
    assert model == "the model"
    assert options == {
        "config": str(tmp_path / "ds.json"),
        "base_dir": "model",
        "checkpoint": str(tmp_path / "list.json"),
    }
    assert json.loads((tmp_path / "list.json").read_text()) == {
        "type": "ds_model",
        "checkpoints": [str(tmp_path / "model/b.bin"), str(tmp_path / "model/deep/a.pt")],
        "version": 1.0,
    }


def test_neither_file_is_needed(deepspeed, make_context):
    yaml = {"handler": {"model_path": "/weights"}, "deepspeed": {"config": None, "dtype": "fp16"}}
    _, options = get_ds_engine(None, make_context(yaml=yaml))
    assert options == {"config": None, "base_dir": "/weights", "checkpoint": None}


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ({}, "kitten has no deepspeed config in model config yaml file"),
        ({"deepspeed": {"config": "gone.json"}}, "kitten has no deepspeed config file .*gone.json"),
        ({"deepspeed": {"checkpoint": "list.json"}}, "needs handler.model_path"),
    ],
)
def test_a_configuration_that_cannot_be_used(deepspeed, make_context, yaml, sentence):
    with pytest.raises(ValueError, match=sentence):
        get_ds_engine(None, make_context(yaml=yaml))


def test_without_deepspeed(monkeypatch, make_context):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ImportError, match="pip install deepspeed"):
        get_ds_engine(None, make_context(yaml={"deepspeed": {"config": None, "x": 1}}))


@pytest.mark.parametrize(("rank", "device"), [("3", 3), (None, 0)])
def test_the_device_of_a_rank(monkeypatch, make_context, rank, device):
    if rank is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", rank)
    handler = BaseDeepSpeedHandler()
    handler.initialize(make_context())
    assert handler.device == device
