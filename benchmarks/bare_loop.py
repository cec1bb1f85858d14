"""The same handler without a server: batch after batch through handle(), in one process.

    python bare_loop.py MODEL_DIRECTORY PHOTOGRAPH BATCH_SIZE SECONDS THREADS

Prints images per second. What a server adds to this is what its clients pay for having one.
"""

import sys
import time
from pathlib import Path

import torch

from marserve.backend.context import Context, RequestProcessor
from marserve.backend.manifest import Manifest
from marserve.backend.metrics import MetricsStore
from marserve.handlers.image_classifier import ImageClassifier

_WARM_UP_BATCHES = 2


def main(directory: Path, photograph: Path, batch_size: int, seconds: float) -> float:
    """Images per second over at least so many seconds, counted in whole batches."""
    manifest = Manifest.read(directory)
    assert manifest is not None
    sys.path.insert(0, str(directory))
    metrics = MetricsStore()
    context = Context(
        manifest.model_name, str(directory), manifest.raw, batch_size, None, "", metrics=metrics
    )
    handler = ImageClassifier()
    handler.initialize(context)
    encoded = photograph.read_bytes()

    def run_batch() -> None:
        context.request_processor = [RequestProcessor({}) for _ in range(batch_size)]
        handler.handle([{"body": bytearray(encoded)} for _ in range(batch_size)], context)
        metrics.drain()

    for _ in range(_WARM_UP_BATCHES):
        run_batch()
    images, began, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds:
        run_batch()
        images += batch_size
        elapsed = time.perf_counter() - began
    return images / elapsed


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[5]))
    print(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])))
