"""What it is worth that stages overlap, and that batches are outstanding.

Three stages of 20 ms each that overlap, against the slowest of them alone and against one after the
other. Photographs of 640 x 427 into a network of three layers on the CPU, and of 1600 x 1067 into
ResNet-18: stages that overlap, decoding in threads, and a second worker, against none of these. A
model that does nothing: two batches outstanding against one.

All models of a comparison are on one server and take turns. OMP_NUM_THREADS=1 in the environment
gives each worker one thread of torch's.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from load import Plan, generate
from PIL import Image
from processes import Marserve, pack
from report import Row
from resnet152 import PHOTOGRAPH
from staged_handler import STAGE_SECONDS

_HERE = Path(__file__).resolve().parent
_GOAL = 0.9
_COMMON = "batchSize: {batch}\nmaxBatchDelay: 50\njobQueueSize: 1000\n"

_SMALL_MODEL = """\
from itertools import pairwise

from torch import nn


class Small(nn.Sequential):
    def __init__(self):
        widths = (3, 16, 32, 64)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU())
            for a, b in pairwise(widths)
        ]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
"""


_RESNET_18 = """\
from torchvision.models.resnet import BasicBlock, ResNet


class ResNet18(ResNet):
    def __init__(self):
        super().__init__(BasicBlock, [2, 2, 2, 2])
"""


class _Bench:
    """Models that take turns on one server.

    Args:
        directory: An empty one.
        quick: Whether few and short runs will do.
    """

    def __init__(self, directory: Path, quick: bool) -> None:
        self.directory = directory
        self._repetitions, self._seconds = (2, 2.0) if quick else (5, 5.0)

    def rates(
        self, models: Mapping[str, str], handler: str | Path, body: Path, batch: int, **files: Path
    ) -> dict[str, list[float]]:
        """Answers per second of each model, repetition by repetition; with one worker, or with two.

        Args:
            models: Name to the text of its model-config.yaml, which may say ``minWorkers: 2``.
            handler: Of them all.
            body: What clients post.
            batch: Batch size; there are eight batches of clients.
            **files: Further flags of the archiver.
        """
        for name, text in models.items():
            config = self.directory / f"{name}.yaml"
            config.write_text(f"{_COMMON.format(batch=batch)}{text}", encoding="utf-8")
            flags = {flag.replace("_", "-"): path for flag, path in files.items()}
            named = {"model-name": name, "handler": handler, "config-file": config}
            pack(self.directory / "store", {**named, **flags})
        found: dict[str, list[float]] = {name: [] for name in models}
        with Marserve(self.directory).running() as server:
            for _ in range(self._repetitions):
                for name, rates in found.items():
                    workers = 2 if "minWorkers: 2" in models[name] else 1
                    with server.model(f"{name}.mar", initial_workers=workers):
                        rates.append(self._rate(server, name, body, batch))
        return found

    def _rate(self, server: Marserve, name: str, body: Path, batch: int) -> float:
        port, path = server.inference_port, f"/predictions/{name}"
        return generate(Plan(port, path, str(body), 8 * batch, self._seconds, step=batch)).rate


def measure(directory: Path, quick: bool) -> list[Row]:
    """All of it, one after the other, each on a server of its own."""
    rows: list[Row] = []
    for compare in (_device, _small_images, _large_images, _tiny):
        workplace = directory / compare.__name__.strip("_")
        workplace.mkdir()
        rows += compare(_Bench(workplace, quick))
    return rows


def _device(bench: _Bench) -> list[Row]:
    """Stages of equal length."""
    body = bench.directory / "body"
    body.write_bytes(b"x")
    models = {"overlapping": "overlapStages: true\n", "serial": ""}
    rates = bench.rates(models, _HERE / "staged_handler.py", body, 4)
    ours = rates["overlapping"]
    name = "three stages of 20 ms, batch 4: req/s"
    return [
        Row(name, ours, "the slowest stage", [4 / STAGE_SECONDS], at_least=_GOAL),
        Row(name, ours, "one after the other", rates["serial"]),
    ]


def _small_images(bench: _Bench) -> list[Row]:
    """Decoding is most of the work."""
    return _images(bench, "photographs, three layers", PHOTOGRAPH, _SMALL_MODEL)


def _large_images(bench: _Bench) -> list[Row]:
    """Decoding is about half of the work."""
    photograph = bench.directory / "large.jpg"
    with Image.open(PHOTOGRAPH) as image:
        image.resize((1600, 1067), Image.Resampling.BICUBIC).save(photograph, quality=90)
    return _images(bench, "large photographs, ResNet-18", photograph, _RESNET_18)


def _images(bench: _Bench, name: str, photograph: Path, source: str) -> list[Row]:
    """Decoding beside a network, on the processors that there are."""
    model, weights = bench.directory / "model.py", bench.directory / "weights.pth"
    model.write_text(source, encoding="utf-8")
    torch.manual_seed(0)
    scope: dict[str, Any] = {"__name__": "model"}
    exec(source, scope)
    network = next(each for each in scope.values() if getattr(each, "__module__", "") == "model")
    torch.save(network().state_dict(), weights)
    one, all_cores = (
        f"handler: {{decode_threads: {count}}}\n" for count in (1, len(os.sched_getaffinity(0)))
    )
    models = {
        "plain": one,
        "overlapping": f"overlapStages: true\n{one}",
        "threads": all_cores,
        "both": f"overlapStages: true\n{all_cores}",
        "workers": f"minWorkers: 2\nmaxWorkers: 2\n{one}",
    }
    rates = bench.rates(
        models, "image_classifier", photograph, 8, model_file=model, serialized_file=weights
    )
    texts = {
        "overlapping": "stages overlap",
        "threads": "decoded in threads",
        "both": "both",
        "workers": "two workers",
    }
    return [
        Row(f"{name}, batch 8, {text}: images/s", rates[key], "none of it", rates["plain"])
        for key, text in texts.items()
    ]


def _tiny(bench: _Bench) -> list[Row]:
    """The next batch lies in the worker's wire."""
    body = bench.directory / "body"
    body.write_bytes(b"x" * 1024)
    models = {"two": "outstandingBatches: 2\n", "one": ""}
    rows = []
    for batch in (1, 32):
        rates = bench.rates(models, _HERE / "noop_handler.py", body, batch)
        name = f"no-op, batch {batch}, two outstanding: req/s"
        rows.append(Row(name, rates["two"], "one", rates["one"]))
    return rows
