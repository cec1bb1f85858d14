import io
import json

import pytest
import torch
from PIL import Image

from marserve.backend.loader import load_service
from marserve.backend.profiling.measurements import Measurements
from marserve.backend.protocol import Load, Trials
from marserve.handlers.image_classifier import ImageClassifier

MODEL_FILE = """
import torch

class Brightness(torch.nn.Module):
    '''Class 0 for dark images, the last one for bright ones.'''

    def __init__(self):
        super().__init__()
        self.classes = CLASSES

    def forward(self, x):
        return x.mean(dim=(1, 2, 3))[:, None] * torch.arange(self.classes)
"""


def encode(grey: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new("L", (300, 280), grey).convert(mode).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def classify(tmp_path, make_context, begin_batch):
    """Answer a batch of images with a model that has ``classes`` classes."""

    def run(classes, *images, handler=None):
        name = f"model_{tmp_path.name}.py"
        (tmp_path / name).write_text(MODEL_FILE.replace("CLASSES", str(classes)))
        handler = handler or ImageClassifier()
        context = make_context(modelFile=name)
        handler.initialize(context)
        begin_batch(context, *({} for _ in images))
        return handler.handle([{"body": item} for item in images], context)

    return run


def test_the_five_best_classes_best_first(classify):
    bright, dark = classify(7, encode(255), encode(0))

    assert list(bright) == ["6", "5", "4", "3", "2"]
    assert list(dark) == ["0", "1", "2", "3", "4"]
    for answer in (bright, dark):
        assert list(answer.values()) == sorted(answer.values(), reverse=True)
        assert 0.9 < sum(answer.values()) < 1


def test_fewer_classes_than_five_are_all_answered(classify):
    [answer] = classify(2, encode(255))
    assert list(answer) == ["1", "0"]
    assert sum(answer.values()) == pytest.approx(1)


def test_classes_by_name(tmp_path, classify):
    (tmp_path / "index_to_name.json").write_text(json.dumps({"0": ["n0", "dark"], "1": "bright"}))
    [answer] = classify(2, encode(0))
    assert list(answer) == ["dark", "bright"]


def test_the_number_of_classes_can_be_set(classify):
    handler = ImageClassifier()
    handler.set_max_result_classes(1)
    assert handler.get_max_result_classes() == 1
    assert ImageClassifier.topk == 5
    assert [len(item) for item in classify(7, encode(0), encode(255), handler=handler)] == [1, 1]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P"])
def test_other_modes_are_classified_alike(classify, mode):
    [answer] = classify(3, encode(255, mode))
    [reference] = classify(3, encode(255))
    assert answer == reference


def test_an_invalid_image_among_valid_ones(classify):
    dark, bad, bright = classify(2, encode(0), b"kitten", encode(255))
    assert (list(dark), list(bright)) == (["0", "1"], ["1", "0"])
    assert bad["code"] == 400


def test_images_are_prepared_as_for_imagenet():
    white = ImageClassifier.image_processing(Image.new("RGB", (640, 480), (255, 255, 255)))
    assert white.shape == (3, 224, 224)
    expected = (1 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    assert torch.allclose(white[:, 0, 0], expected)


def test_a_load_measures_what_batches_of_the_sample_cost(tmp_path):
    name = f"model_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODEL_FILE.replace("CLASSES", "7"))
    manifest = {"model": {"modelName": "m", "modelFile": f"{name}.py"}}
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "MAR-INF/MANIFEST.json").write_text(json.dumps(manifest))
    plain = ("m", str(tmp_path), "image_classifier", 4, None, True, 1 << 20, "1")
    load = Load(*plain, trials=Trials(sizes=[1, 2], seconds=60.0))
    profiled = Measurements(load, load_service(load)).run_trials().profiled
    assert [cost.size for cost in profiled.costs] == [1, 2]
    assert profiled.note == ""
