"""A handler that recognises a digit; it runs on TorchServe, too."""

import torch
from torchvision import transforms
from ts.torch_handler.vision_handler import VisionHandler


class DigitHandler(VisionHandler):
    """Answers an image of 8 x 8 grey pixels with ``{"digit": 7, "probability": 0.99}``."""

    image_processing = transforms.Compose([transforms.Grayscale(), transforms.ToTensor()])
    sample_size = 8, 8  # the server tries the model with an image of this size

    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        """Return an answer per image for logits of shape ``(requests, 10)``."""
        probabilities, digits = torch.softmax(data, dim=1).max(dim=1)
        return [
            {"digit": digit, "probability": probability}
            for digit, probability in zip(digits.tolist(), probabilities.tolist(), strict=True)
        ]
