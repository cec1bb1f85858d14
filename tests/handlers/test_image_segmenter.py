import io

import pytest
import torch
from PIL import Image
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

from marserve.backend.errors import PredictionException
from marserve.handlers.image_segmenter import ImageSegmenter


def encode(*colours) -> bytes:
    """Stripes of these colours, from left to right."""
    image = Image.new("RGB", (256, 256))
    width = 256 // len(colours)
    for i, colour in enumerate(colours):
        image.paste(colour, (i * width, 0, (i + 1) * width, 256))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class ByColour(torch.nn.Module):
    """A pixel's class is its strongest channel."""

    def forward(self, x):
        return {"out": 4 * x, "aux": x}


@pytest.fixture
def segment(make_context, begin_batch):
    def run(model, *bodies, headers=None):
        handler = ImageSegmenter()
        handler.model, handler.device = model.eval(), torch.device("cpu")
        context = begin_batch(make_context(), *(headers or [{}] * len(bodies)))
        return handler.handle([{"body": item} for item in bodies], context), context

    return run


def test_the_best_class_of_every_pixel_and_its_probability(segment):
    (sides, blue), _ = segment(ByColour(), encode("red", "lime"), encode("blue"))

    assert torch.tensor(sides).shape == torch.tensor(blue).shape == (224, 224, 2)
    assert [sides[100][10][0], sides[100][-10][0], blue[100][100][0]] == [0.0, 1.0, 2.0]
    assert all(isinstance(value, float) for value in sides[100][10])
    pixel = ImageSegmenter.image_processing(Image.new("RGB", (256, 256), "red"))[:, 0, 0]
    expected = torch.softmax(4 * pixel, dim=0).max().item()
    assert sides[100][10][1] == pytest.approx(expected)


def test_a_model_of_torchvision(segment):
    model = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    [answer], _ = segment(model, encode("red", "blue"))
    pixels = torch.tensor(answer)
    assert pixels.shape == (224, 224, 2)
    assert set(pixels[..., 0].unique().tolist()) <= {0.0, 1.0, 2.0}
    assert (pixels[..., 1] >= 1 / 3 - 1e-6).all()


def test_an_invalid_image_among_valid_ones(segment):
    (good, bad), context = segment(ByColour(), encode("red"), b"kitten")
    assert good[0][0][0] == 0.0
    assert bad["code"] == context.get_response_status(1)[0] == 400


def test_segments_are_not_explained(segment):
    with pytest.raises(PredictionException, match="ImageSegmenter gives no explanations : 501"):
        segment(ByColour(), encode("red"), headers=[{"explain": "True"}])
