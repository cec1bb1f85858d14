"""The default handlers on real small models, as archives that real workers serve.

The image classifier has a file of its own.
"""

import io
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

WORDS = ["<unk>", "good", "bad", "not", "not bad", "film"]
MOOD = """
import torch

class Mood(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(6, 2, mode="sum")

    def forward(self, text, offsets):
        return self.embedding(text, offsets)
"""
DETECTOR = """
import torch
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

class Detector(FasterRCNN):
    def __init__(self):
        backbone = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 5, stride=8), torch.nn.ReLU())
        backbone.out_channels = 8
        super().__init__(
            backbone,
            num_classes=3,
            min_size=64,
            max_size=128,
            rpn_anchor_generator=AnchorGenerator(((16, 32),), ((0.5, 1.0),)),
            box_score_thresh=0.0,
            box_detections_per_img=4,
        )
"""
ALL_OBJECTS = """
from ts.torch_handler.object_detector import ObjectDetector

class AllObjects(ObjectDetector):
    threshold = 0.0
"""
SEGMENTER = """
import torch
from torchvision.models.segmentation.fcn import FCN, FCNHead
from torchvision.models._utils import IntermediateLayerGetter

class Segmenter(FCN):
    def __init__(self):
        layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1))
        super().__init__(IntermediateLayerGetter(layers, {"0": "out"}), FCNHead(8, 2))
"""


def picture(width, height, colour="red"):
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def server(share_server):
    with share_server(preload_modules="torch") as server:
        yield server


@pytest.fixture
def serve(server, make_archive, tmp_path):
    """Serve a model file with random weights, and what else there is in its directory."""

    def serve(handler, name, source, **files):
        path = tmp_path / f"{name}_model.py"
        path.write_text(source)
        for file, content in files.items():
            (tmp_path / file).write_text(json.dumps(content))
        extra = ",".join(
            str(item) for item in tmp_path.iterdir() if item.suffix in (".json", ".pt")
        )
        archive = make_archive(
            server.store,
            handler,
            name,
            serialized_file=str(weights(path, tmp_path)),
            model_file=str(path),
            extra_files=extra,
        )
        query = {"initial_workers": 1, "batch_size": 2, "max_batch_delay": 60_000}
        registered = server.register(archive, **query)
        assert registered.status_code == 200, registered.text

    return serve


def weights(model_file: Path, folder: Path) -> Path:
    from marserve.handlers.model_files import import_model_file
    from marserve.handlers.utils import list_classes_from_module

    torch.manual_seed(0)
    [model] = list_classes_from_module(import_model_file(model_file))
    state = model().state_dict()
    if "embedding.weight" in state:
        values = [[0.0, 0], [0, 2], [3, 0], [1, 0], [0, 9], [0, 0]]
        state["embedding.weight"] = torch.tensor(values)
    torch.save(state, folder / "weights.bin")
    return folder / "weights.bin"


def test_the_text_classifier(server, serve, tmp_path, together):
    torch.save(WORDS, tmp_path / "source_vocab.pt")
    serve("text_classifier", "mood", MOOD, **{"index_to_name.json": {"0": "bad", "1": "good"}})

    texts = ["A good film!", "<b>Not</b> bad."]
    first, second = together([lambda t=t: server.predict("mood", data=t) for t in texts])

    expected = torch.softmax(torch.tensor([[0.0, 2], [4, 9]]), dim=1).tolist()
    assert first.json() == {
        "bad": pytest.approx(expected[0][0]),
        "good": pytest.approx(expected[0][1]),
    }
    assert second.json()["good"] == pytest.approx(expected[1][1])

    explained = together(
        [lambda: server.inference("POST", "/explanations/mood", data="good film")] * 2
    )
    assert [item.json()["words"] for item in explained] == [["good", "film", "good film"]] * 2


def test_the_object_detector_and_a_model_of_torchvision(server, serve, together):
    names = {"object_type_names": ["background", "cat", "dog"]}
    serve(ALL_OBJECTS, "finder", DETECTOR, **{"index_to_name.json": names})

    wide, tall = together(
        [
            lambda: server.predict("finder", data=picture(80, 64)),
            lambda: server.predict("finder", data=picture(64, 80, "blue")),
        ]
    )

    for answer, (width, height) in ((wide, (80, 64)), (tall, (64, 80))):
        assert answer.status_code == 200, answer.text
        assert answer.json()
        for found in answer.json():
            [name, score] = found
            assert (name in {"cat", "dog"}, score) == (True, "score")
            x1, y1, x2, y2 = found[name]
            assert 0 <= x1 <= x2 <= width
            assert 0 <= y1 <= y2 <= height


def test_the_image_segmenter_and_a_model_of_torchvision(server, serve, together):
    serve("image_segmenter", "areas", SEGMENTER)
    good, bad = together(
        [
            lambda: server.predict("areas", data=picture(300, 200)),
            lambda: server.predict("areas", data=b"kitten"),
        ]
    )
    pixels = torch.tensor(good.json())
    assert pixels.shape == (224, 224, 2)
    assert set(pixels[..., 0].unique().tolist()) <= {0.0, 1.0}
    assert (pixels[..., 1] >= 0.5).all()
    assert bad.status_code == 400
