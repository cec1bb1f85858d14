"""A small convolutional network for digits of 8 x 8 pixels."""

import torch
from torch import nn


class DigitNet(nn.Sequential):
    """Two convolutions and a linear layer, from ``(n, 1, 8, 8)`` to logits ``(n, 10)``."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 2 * 2, 10),
        )

    def classify(self, images: torch.Tensor) -> torch.Tensor:
        """Return the digits of images, shape ``(n,)``."""
        with torch.inference_mode():
            return self(images).argmax(dim=1)
