"""A small convolutional network on the CPU: raw bytes of a 3x64x64 image in, the class out.

Its weights are seeded random ones: only what it costs is of interest.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import nn

_SIDE = 64


def _network() -> nn.Module:
    torch.manual_seed(0)
    widths = (3, 32, 64, 128, 128)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return nn.Sequential(*blocks, head).eval()


class Classifier:
    """The handler."""

    def initialize(self, _context: Any) -> None:
        """Build the network; one thread, for the clients run on the same machine."""
        torch.set_num_threads(1)
        self._network = _network()

    def handle(self, data: Any, _context: Any) -> list[str]:
        """One class per request."""
        images = [torch.frombuffer(row["body"], dtype=torch.uint8) for row in data]
        batch = torch.stack(images).view(-1, 3, _SIDE, _SIDE).float().div_(255.0)
        with torch.inference_mode():
            return [str(one) for one in self._network(batch).argmax(1).tolist()]
