"""Handlers around a stand-in for DALI; the real library was never run with these."""

import sys
import types
import warnings

import numpy as np
import pytest
import torch

from marserve.backend.errors import PredictionException
from marserve.handlers.dali_image_classifier import DALIImageClassifier
from marserve.handlers.engines.dali import get_dali_pipeline

SETTINGS = {"batch_size": 8, "num_threads": 2, "device_id": 0, "seed": -1}


class Images:
    def __init__(self, files) -> None:
        self.files = files

    def as_tensor(self):
        """The first three bytes of each file, as the brightness of its channels."""
        return np.stack([file[:3].astype(np.float32).reshape(3, 1, 1) for file in self.files])


class Pipeline:
    """Stores its arguments; like the real one, a context manager around its steps."""

    def __init__(self, **options) -> None:
        self.options = options
        self.outputs: tuple = ()
        self.is_built = False

    @classmethod
    def deserialize(cls, filename, **options):
        return cls(filename=filename, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        pass

    def set_outputs(self, *outputs) -> None:
        self.outputs = outputs

    def build(self) -> None:
        self.is_built = True

    def run(self, source):
        return (Images(source),)


def step(name):
    return lambda *inputs, **options: (name, inputs, options)


@pytest.fixture
def dali(monkeypatch):
    fn = types.SimpleNamespace(
        external_source=step("source"),
        decoders=types.SimpleNamespace(image=step("decode")),
        resize=step("resize"),
        crop_mirror_normalize=step("normalize"),
    )
    for name, members in {
        "nvidia": {},
        "nvidia.dali": {
            "pipeline": types.SimpleNamespace(Pipeline=Pipeline),
            "types": types.SimpleNamespace(UINT8="uint8", RGB="rgb"),
        },
        "nvidia.dali.fn": vars(fn),
    }.items():
        module = types.ModuleType(name)
        module.__path__ = []
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def handler(dali, tmp_path, make_context):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(torch.nn.Flatten()), tmp_path / "model.pt")
    handler = DALIImageClassifier()
    handler.initialize(make_context(serializedFile="model.pt", yaml={"dali": SETTINGS}))
    return handler


def test_the_default_pipeline_preprocesses_like_the_image_classifier(dali, make_context):
    pipeline = get_dali_pipeline(make_context(yaml={"dali": SETTINGS}))
    assert pipeline.options == {**SETTINGS, "prefetch_queue_depth": 1}
    assert pipeline.is_built
    [(name, [(resize, [(decode, [(source, _, named)], _)], sizes)], normal)] = pipeline.outputs
    assert [source, decode, resize, name] == ["source", "decode", "resize", "normalize"]
    assert named["name"] == "source"
    assert (sizes["size"], sizes["mode"], normal["crop"]) == ([256], "not_smaller", (224, 224))
    assert normal["mean"][0] == pytest.approx(0.485 * 255)


def test_a_pipeline_of_the_archive(dali, tmp_path, make_context):
    (tmp_path / "mine.dali").touch()
    settings = {**SETTINGS, "pipeline_file": "mine.dali"}
    pipeline = get_dali_pipeline(make_context(yaml={"dali": settings}))
    assert pipeline.options["filename"] == str(tmp_path / "mine.dali")


@pytest.mark.parametrize(
    ("yaml", "error", "sentence"),
    [
        ({}, ValueError, "kitten has no dali config in model config yaml file"),
        ({"dali": {"batch_size": 1, "seed": 1}}, ValueError, "lacks num_threads, device_id"),
        (
            {"dali": {**SETTINGS, "pipeline_file": "gone"}},
            RuntimeError,
            "Missing dali pipeline file",
        ),
    ],
)
def test_a_configuration_that_cannot_be_used(dali, make_context, yaml, error, sentence):
    with pytest.raises(error, match=sentence):
        get_dali_pipeline(make_context(yaml=yaml))


def test_without_dali(monkeypatch, make_context):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ImportError, match="dali_image_classifier needs the package nvidia-dali"):
        get_dali_pipeline(make_context(yaml={"dali": SETTINGS}))


def test_a_batch(handler, make_context, begin_batch):
    rows = [{"data": bytes([0, 9, 1])}, {"body": bytearray([9, 0, 1])}]
    answers = handler.handle(rows, begin_batch(make_context(), {}, {}))
    assert [list(item) for item in answers] == [["1", "2", "0"], ["0", "2", "1"]]
    assert handler.initialized
    handler.set_max_result_classes(1)
    assert handler.get_max_result_classes() == 1
    assert len(handler.handle(rows[:1], begin_batch(make_context(), {}))[0]) == 1


def test_a_request_without_a_file_is_refused_alone(handler, make_context, begin_batch):
    context = begin_batch(make_context(), {}, {})
    bad, good = handler.handle([{"body": {"a": 1}}, {"body": b"\0\1\2"}], context)
    assert bad["code"] == context.get_response_status(0)[0] == 400
    assert next(iter(good)) == "2"


def test_explanations_need_captum(monkeypatch, handler, make_context, begin_batch):
    monkeypatch.setitem(sys.modules, "captum.attr", None)
    with pytest.raises(PredictionException, match=r"captum.* : 501"):
        handler.handle([{"body": b"123"}], begin_batch(make_context(), {"explain": "True"}))


def test_the_sample_is_an_image_file():
    samples = DALIImageClassifier().sample_input()
    assert len(set(samples)) == 2
    assert all(sample.startswith(b"\xff\xd8\xff") for sample in samples)
