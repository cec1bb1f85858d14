"""Object detection: the boxes of objects whose score reaches a threshold."""

from typing import Any

import torch
from torchvision import transforms

from marserve.handlers.base_handler import BaseHandler
from marserve.handlers.inputs.images import to_rgb
from marserve.handlers.timer import timed
from marserve.handlers.utils import map_class_to_label
from marserve.handlers.vision_handler import VisionHandler


class ObjectDetector(VisionHandler):
    """Answers each image with its objects: class name, box in pixels, score."""

    threshold = 0.5  # minimal score of an object in the answer
    image_processing = transforms.Compose([to_rgb, transforms.ToTensor()])

    # Attribution needs one score per image; a detector has one per object.
    get_insights = BaseHandler.get_insights

    @timed
    def preprocess(self, data: Any) -> Any:
        """Return one tensor if all images have one size, else a list of tensors."""
        usable = self.each_usable(self._tensor_of, data)
        images = [image.to(self.device) for image in usable]
        has_same_size = len({image.shape for image in images}) == 1
        return torch.stack(images) if has_same_size else images

    @timed
    def inference(self, data: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the model over one tensor or a list of tensors."""
        # A scripted detector accepts only a list, and returns its losses and the objects.
        images = list(data) if _takes_a_list(self.model) else data
        with torch.inference_mode():
            output = self.model(images, *args, **kwargs)
        return output[1] if isinstance(output, tuple) else output

    @timed
    def postprocess(self, data: Any) -> list[list[dict[str, Any]]]:
        """Return ``{class name: [x1, y1, x2, y2], "score": score}`` of each image's objects.

        ``data`` has a dict of tensors per image, as torchvision's detection models return it:
        ``boxes`` of shape ``(objects, 4)``, ``labels`` and ``scores`` of shape ``(objects,)``.
        """
        return [self._objects(found) for found in data]

    def _objects(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        sure = found["scores"] >= self.threshold
        boxes, labels, scores = (found[key][sure].tolist() for key in ("boxes", "labels", "scores"))
        named = map_class_to_label(
            [[box] for box in boxes], self.mapping, [[label] for label in labels]
        )
        return [{**box, "score": score} for box, score in zip(named, scores, strict=True)]


def _takes_a_list(model: Any) -> bool:
    if not isinstance(model, torch.jit.ScriptModule):
        return False
    forward: Any = model.forward
    _, images, *_ = forward.schema.arguments
    return str(images.type).startswith("List")
