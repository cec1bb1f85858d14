"""Which digit is in the picture. TorchServe runs this file as well."""

import torch
from torchvision import transforms
from ts.torch_handler.vision_handler import VisionHandler


class DigitHandler(VisionHandler):
    """Takes an image file of 8 x 8 grey pixels, answers ``{"digit": 7, "probability": 0.99}``."""

    image_processing = transforms.Compose([transforms.Grayscale(), transforms.ToTensor()])

    def postprocess(self, data: torch.Tensor) -> list[dict[str, float]]:
        """The best of ten logits per image, shape ``(requests, 10)``, as an answer each."""
        probabilities, digits = torch.softmax(data, dim=1).max(dim=1)
        return [
            {"digit": digit, "probability": probability}
            for digit, probability in zip(digits.tolist(), probabilities.tolist(), strict=True)
        ]
