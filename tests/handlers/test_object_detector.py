import io
import json
import warnings

import pytest
import torch
from PIL import Image
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

from marserve.backend.errors import PredictionException
from marserve.handlers.object_detector import ObjectDetector


def encode(width: int = 8, height: int = 8) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


class Frames(torch.nn.Module):
    """Finds three objects in every image, the first as large as the image."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[type] = []

    def forward(self, images):
        self.inputs.append(type(images))
        return [
            {
                "boxes": torch.tensor(
                    [[0.0, 0, item.shape[2], item.shape[1]], [1, 2, 3, 4], [0] * 4]
                ),
                "labels": torch.tensor([1, 2, 3]),
                "scores": torch.tensor([0.75, 0.5, 0.25]),
            }
            for item in images
        ]


@pytest.fixture
def detect(make_context, begin_batch):
    def run(model, *bodies, headers=None, handler=None):
        handler = handler or ObjectDetector()
        handler.model, handler.device = model.eval(), torch.device("cpu")
        context = begin_batch(make_context(), *(headers or [{}] * len(bodies)))
        return handler.handle([{"body": item} for item in bodies], context), context

    return run


def test_objects_from_the_threshold_on(detect):
    [answer], _ = detect(Frames(), encode())
    assert answer == [
        {"1": [0.0, 0.0, 8.0, 8.0], "score": 0.75},
        {"2": [1.0, 2.0, 3.0, 4.0], "score": 0.5},
    ]


def test_the_threshold_can_be_set(detect):
    class Sure(ObjectDetector):
        threshold = 0.9

    [answer], _ = detect(Frames(), encode(), handler=Sure())
    assert answer == []


def test_objects_by_name(detect):
    handler = ObjectDetector()
    handler.mapping = json.loads('{"1": "cat", "2": "dog"}')
    [answer], _ = detect(Frames(), encode(), handler=handler)
    assert [[*item] for item in answer] == [["cat", "score"], ["dog", "score"]]


def test_images_of_one_size_are_one_tensor(detect):
    model = Frames()
    detect(model, encode(), encode())
    assert model.inputs == [torch.Tensor]


def test_images_of_several_sizes(detect):
    model = Frames()
    (wide, tall), _ = detect(model, encode(9, 4), encode(4, 9))
    assert model.inputs == [list]
    assert (wide[0]["1"], tall[0]["1"]) == ([0, 0, 9, 4], [0, 0, 4, 9])


class Scripted(torch.nn.Module):
    """Like torchvision's scripted detectors: takes a list, returns losses and objects."""

    def forward(self, images: list[torch.Tensor]):
        found = [
            {
                "boxes": torch.ones(1, 4),
                "labels": torch.ones(1, dtype=torch.int64),
                "scores": torch.ones(1),
            }
            for _ in images
        ]
        losses: dict[str, torch.Tensor] = {}
        return losses, found


class ScriptedForTensors(torch.nn.Module):
    def forward(self, images):
        ones = torch.ones(images.shape[0], 4)
        return [{"boxes": ones, "labels": torch.ones(1) == 1, "scores": torch.ones(1)}]


def test_a_scripted_detector(detect):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(Scripted())
    answers, _ = detect(model, encode(), encode())
    assert answers == [[{"1": [1.0, 1.0, 1.0, 1.0], "score": 1.0}]] * 2


def test_a_scripted_model_that_takes_a_tensor_gets_one(detect):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(ScriptedForTensors())
    [answer], _ = detect(model, encode())
    assert [item["score"] for item in answer] == [1.0]


def test_a_model_of_torchvision(detect):
    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, box_score_thresh=0.0
    )

    class Curious(ObjectDetector):
        threshold = 0.0

    answers, _ = detect(model, encode(80, 64), encode(64, 64), handler=Curious())

    assert len(answers) == 2
    assert answers[0]
    for item in answers[0]:
        label, score = item
        assert score == "score"
        assert label in {"1", "2"}
        x1, y1, x2, y2 = item[label]
        assert 0 <= x1 <= x2 <= 80
        assert 0 <= y1 <= y2 <= 64


def test_an_invalid_image_among_valid_ones(detect):
    (good, bad), context = detect(Frames(), encode(), b"kitten")
    assert [item["score"] for item in good] == [0.75, 0.5]
    assert bad["code"] == context.get_response_status(1)[0] == 400


def test_objects_are_not_explained(detect):
    with pytest.raises(PredictionException, match="ObjectDetector gives no explanations : 501"):
        detect(Frames(), encode(), headers=[{"explain": "True"}])
