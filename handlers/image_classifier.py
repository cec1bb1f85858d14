"""Image classification: ImageNet's preprocessing and the names of the best classes."""

from typing import Any

import torch
from torchvision import transforms

from marserve.handlers.inputs.images import to_rgb
from marserve.handlers.timer import timed
from marserve.handlers.utils import map_class_to_label
from marserve.handlers.vision_handler import VisionHandler


class ImageClassifier(VisionHandler):
    """Answers each image with its most probable classes, the best first."""

    topk = 5  # classes per answer; fewer if the model has fewer
    image_processing = transforms.Compose(
        [
            to_rgb,
            transforms.Resize(256),
            transforms.CenterCrop(224),
            transforms.ToTensor(),
            transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        ]
    )

    def set_max_result_classes(self, topk: int) -> None:
        """Set the number of classes per answer."""
        self.topk = topk

    def get_max_result_classes(self) -> int:
        """Return the number of classes per answer."""
        return self.topk

    @timed
    def postprocess(self, data: Any) -> list[dict[str, float]]:
        """Return ``{class name: probability}`` of the best classes, for logits of each request."""
        classes = min(self.topk, data.shape[1])
        best, indices = torch.topk(torch.softmax(data, dim=1), classes, dim=1)
        return map_class_to_label(best.tolist(), self.mapping, indices.tolist())
