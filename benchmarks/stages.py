"""What it is worth that stages overlap, and that batches are outstanding.

Three stages of 20 ms each that overlap, against the slowest of them alone and against one after the
other. Photographs of 640 x 427 into a small network on the CPU, where decoding is most of the work:
stages that overlap, and decoding in threads, against neither. A model that does nothing: two
batches outstanding against one.

All models of a comparison are on one server and take turns.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from load import Plan, generate
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
        """Answers per second of each model, repetition by repetition.

        Args:
            models: Name to the text of its model-config.yaml.
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
                    with server.model(f"{name}.mar"):
                        rates.append(self._rate(server, name, body, batch))
        return found

    def _rate(self, server: Marserve, name: str, body: Path, batch: int) -> float:
        port, path = server.inference_port, f"/predictions/{name}"
        return generate(Plan(port, path, str(body), 8 * batch, self._seconds, step=batch)).rate


def measure(directory: Path, quick: bool) -> list[Row]:
    """All of it, one after the other, each on a server of its own."""
    rows: list[Row] = []
    for compare in (_device, _images, _tiny):
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


def _images(bench: _Bench) -> list[Row]:
    """Decoding beside a small network, on the processors that there are."""
    model, weights = bench.directory / "model.py", bench.directory / "small.pth"
    model.write_text(_SMALL_MODEL, encoding="utf-8")
    torch.manual_seed(0)
    scope: dict[str, type[torch.nn.Module]] = {}
    exec(_SMALL_MODEL, scope)
    torch.save(scope["Small"]().state_dict(), weights)
    one, all_cores = (
        f"handler: {{decode_threads: {count}}}\n" for count in (1, len(os.sched_getaffinity(0)))
    )
    models = {
        "plain": f"overlapStages: false\n{one}",
        "overlapping": f"overlapStages: true\n{one}",
        "threads": f"overlapStages: false\n{all_cores}",
        "both": f"overlapStages: true\n{all_cores}",
    }
    rates = bench.rates(
        models, "image_classifier", PHOTOGRAPH, 8, model_file=model, serialized_file=weights
    )
    told = {
        "overlapping": "stages overlap",
        "threads": "decoded in threads",
        "both": "both",
    }
    return [
        Row(f"photographs, batch 8, {text}: images/s", rates[name], "neither", rates["plain"])
        for name, text in told.items()
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
