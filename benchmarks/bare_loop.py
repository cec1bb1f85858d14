"""ResNet-152 in plain torch, batch after batch in one process: what a server is held against.

It runs on the GPU if there is one.

    python bare_loop.py MODEL_DIRECTORY PHOTOGRAPH BATCH_SIZE SECONDS THREADS MODE

From JPEG files to classes, as anybody would write it who needs no server; nothing of marserve is in
it, so that its handlers are measured as well. MODE is one of modes.py's, as JSON. Prints images per
second.
"""

import io
import json
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from resnet152 import WEIGHTS
from torch.fx.experimental.optimization import fuse
from torchvision import transforms
from torchvision.models import resnet152

_WARM_UP_BATCHES = 2
_BEST = 5
_PREPARED = transforms.Compose(
    [
        transforms.Resize(256),
        transforms.CenterCrop(224),
        transforms.ToTensor(),
        transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
    ]
)


class Loop:
    """A model, and batches of one photograph through it."""

    def __init__(self, weights: Path, mode: Mapping[str, Any]) -> None:
        model: Any = resnet152()
        model.load_state_dict(torch.load(weights, weights_only=True))
        model.eval()
        if mode.get("fold_batch_norm"):
            model = fuse(model)
        self._type = torch.bfloat16 if mode.get("precision") == "bf16" else torch.float32
        last = mode.get("channels_last")
        self._layout = torch.channels_last if last else torch.contiguous_format
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if self._device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # as TorchServe and marserve set it
        self._model = model.to(self._device, self._type, memory_format=self._layout)
        if mode.get("compile"):
            self._model = torch.compile(self._model, dynamic=False)

    def classes(self, files: list[bytes]) -> list[list[float]]:
        """The probabilities of the best classes of each image."""
        images = torch.stack(
            [_PREPARED(Image.open(io.BytesIO(one)).convert("RGB")) for one in files]
        )
        with torch.inference_mode():
            images = images.to(self._device, self._type, memory_format=self._layout)
            scores = self._model(images)
            return torch.softmax(scores.float(), dim=1).topk(_BEST).values.tolist()


def main(loop: Loop, photograph: bytes, batch_size: int, seconds: float) -> float:
    """Images per second over at least so many seconds, counted in whole batches."""
    files = [photograph] * batch_size
    for _ in range(_WARM_UP_BATCHES):
        loop.classes(files)
    images, began, elapsed = 0, time.perf_counter(), 0.0
    while elapsed < seconds:
        loop.classes(files)
        images += batch_size
        elapsed = time.perf_counter() - began
    return images / elapsed


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of libraries: only the number is wanted
    torch.set_num_threads(int(sys.argv[5]))
    torch.manual_seed(0)
    running = Loop(Path(sys.argv[1], WEIGHTS), json.loads(sys.argv[6]))
    print(main(running, Path(sys.argv[2]).read_bytes(), int(sys.argv[3]), float(sys.argv[4])))
