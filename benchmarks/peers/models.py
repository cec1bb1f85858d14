"""The models that all servers serve: a list of request bodies in, as many answers out.

Copied beside each peer's application and imported there. Standard library only, but for the
network, whose weights are seeded random ones: only what it costs is of interest.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

Model = Callable[[list[bytes]], list[bytes]]
_SIDE = 64


def load(name: str) -> Model:
    """One of ``echo``, ``length``, ``cnn``; made in the process that will run it."""
    return {"echo": _echo, "length": lambda: _length, "cnn": _cnn}[name]()


def _echo() -> Model:
    return lambda bodies: bodies


def _length(bodies: list[bytes]) -> list[bytes]:
    """Takes much, answers little."""
    return [b"%d" % len(body) for body in bodies]


def _cnn() -> Model:
    """Raw bytes of a 3x64x64 image in, the class out: a few milliseconds for a batch of 32."""
    import torch

    torch.set_num_threads(1)  # the clients and the fronts run on the same machine
    network = _network()

    def classify(bodies: list[bytes]) -> list[bytes]:
        images = [torch.frombuffer(bytearray(body), dtype=torch.uint8) for body in bodies]
        batch = torch.stack(images).view(-1, 3, _SIDE, _SIDE).float().div_(255.0)
        with torch.inference_mode():
            return [b"%d" % one for one in network(batch).argmax(1).tolist()]

    return classify


def _network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    widths = (3, 32, 64, 128, 128)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return nn.Sequential(*blocks, head).eval()
