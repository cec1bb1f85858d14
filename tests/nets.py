"""Small models and handlers for the tests of performance options, and how they are asked."""

import json
import sys
from typing import Any

import pytest
import torch

from marserve.backend.protocol import Input, Part, Predict
from marserve.backend.service import Service
from marserve.handlers.inputs.images import sample_image

MODEL = """
import torch
from torch import nn

class Net(nn.Sequential):
    seen = []

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=4), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
        )
        self[2].register_forward_pre_hook(self.note)

    def note(self, _layer, inputs):
        [x] = inputs
        is_last = x.is_contiguous(memory_format=torch.channels_last)
        Net.seen.append((len(x), {item.dtype for item in self.parameters()}, is_last))

    def forward(self, x):
        return super().forward(x)
"""
NUMBERS = """
from torch import nn

class Linear(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 3))
"""
NUMBERS_HANDLER = """
from ts.torch_handler.base_handler import BaseHandler

class Numbers(BaseHandler):
    def sample_input(self):
        return [0.1, 0.2, 0.3, 0.4]
"""


def ask(service: Service, count: int = 1, headers: dict[str, str] | None = None) -> list[Any]:
    """The answers to so many images."""
    body, headers = sample_image(), headers or {}
    inputs = [Input(str(i), headers, [Part("body", "", bytearray(body))]) for i in range(count)]
    reply = service.predict(Predict(inputs))
    assert reply.code == 200, reply.message
    return [json.loads(item.body) for item in reply.predictions]


def ask_numbers(service: Service, count: int) -> list[Any]:
    part = Part("body", "application/json", b"[1.0, 2.0, 3.0, 4.0]")
    reply = service.predict(Predict([Input(str(i), {}, [part]) for i in range(count)]))
    assert reply.code == 200, reply.message
    return [json.loads(item.body) for item in reply.predictions]


def net() -> Any:
    return sys.modules["optimized_net"].Net


def close(inputs: list[Any], expected: list[Any], tolerance: float) -> bool:
    return all(
        item == pytest.approx(other, abs=tolerance)
        for item, other in zip(inputs, expected, strict=True)
    )


def numbers(answer: Any) -> torch.Tensor:
    """All numbers in a JSON answer, in order."""
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, list) and any(isinstance(item, list | dict) for item in answer):
        return torch.cat([numbers(item) for item in answer])
    return torch.tensor(answer, dtype=torch.float64).flatten()
