"""Image segmentation: ImageNet's preprocessing and the best class of each pixel."""

from typing import Any

import torch

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.image_classifier import ImageClassifier
from marserve.handlers.timer import timed
from marserve.handlers.vision_handler import VisionHandler


class ImageSegmenter(VisionHandler):
    """Answers each image with the class of each pixel and its probability."""

    image_processing = ImageClassifier.image_processing

    # Attribution needs one score per image; a segmenter has one per pixel.
    get_insights = BaseHandler.get_insights

    @timed
    def postprocess(self, data: Any) -> list[Any]:
        """Return nested lists of shape ``(requests, height, width, 2)``: class index, probability.

        ``data["out"]`` are logits of shape ``(requests, classes, height, width)``, as torchvision's
        segmentation models return them.
        """
        best, classes = torch.softmax(data["out"], dim=1).max(dim=1)
        return list(torch.stack([classes.type(best.dtype), best], dim=3).tolist())
