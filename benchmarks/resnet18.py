"""ResNet-18 on the CPU, batches of 8 random images: as a handler, and in a bare loop.

    python resnet18.py THREADS

The loop reads seconds from standard input, line by line, runs for so long, and prints images per
second. With its own threads and OpenMP's variables it is what a served model is held against
(torch_threads.py).
"""

import sys
import time
from typing import Any

import torch
from torchvision.models import resnet18

BATCH_SIZE = 8


class ResNet18:
    """The handler; its weights and images are seeded random ones, only the cost is of interest."""

    def initialize(self, _context: Any) -> None:
        """Make the network."""
        torch.manual_seed(0)
        self._model = resnet18().eval()
        self._images = torch.randn(BATCH_SIZE, 3, 224, 224)

    def handle(self, data: Any, _context: Any) -> list[int]:
        """One class per request."""
        with torch.inference_mode():
            classes: list[int] = self._model(self._images[: len(data)]).argmax(1).tolist()
            return classes


def _rate(model: ResNet18, seconds: float) -> float:
    batches, began, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds:
        model.handle(range(BATCH_SIZE), None)
        batches += 1
        elapsed = time.perf_counter() - began
    return BATCH_SIZE * batches / elapsed


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    running = ResNet18()
    running.initialize(None)
    running.handle(range(BATCH_SIZE), None)
    for line in sys.stdin:
        print(_rate(running, float(line)), flush=True)
