"""Which class is each pixel in: ImageNet's preparation, and the best class of every pixel."""

from typing import Any

import torch

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.image_classifier import ImageClassifier
from marserve.handlers.timer import timed
from marserve.handlers.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """Answers every image with the class of each pixel and how probable it is.

    The model's output is a dict with ``out``, as torchvision's segmentation models give it.
    """

    image_processing = ImageClassifier.image_processing

    # Attribution asks for one score of an image; a segmenter has one per pixel.
    get_insights = BaseHandler.get_insights

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Make nested lists of shape ``(requests, height, width, 2)``: class index, probability.

        ``data["out"]`` is before softmax, of shape ``(requests, classes, height, width)``.
        """
        best, classes = torch.softmax(data["out"], dim=1).max(dim=1)
        return list(torch.stack([classes.type(best.dtype), best], dim=3).tolist())
