"""Runs a model in another precision or memory layout, with inputs and outputs unchanged.

* all      weights, buffers and activations have the lower precision.
* matmul   torch.autocast: only multiplications have it. Sums, and the weights of norms and
           embeddings, stay in fp32.

Outputs are fp32 again: numpy lacks bfloat16, and a softmax in bf16 has two significant digits.
"""

from collections.abc import Callable
from typing import Any

import torch

from marserve.handlers.performance.trees import map_tensors

Forward = Callable[..., Any]

_IMAGES = 4  # dimensions: images, channels, height, width
_LOW = (torch.bfloat16, torch.float16)
_MULTIPLYING = (
    torch.nn.Linear,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.ConvTranspose1d,
    torch.nn.ConvTranspose2d,
    torch.nn.ConvTranspose3d,
)


def lower_weights(model: torch.nn.Module, dtype: torch.dtype, *, matmul_only: bool) -> None:
    """Cast a model's weights in place; with ``matmul_only``, those of multiplying layers.

    autocast would cast these for every batch: a tenth of the time of ResNet-152 on a CPU for one
    image. It still does for derived classes, which may use their weights otherwise.
    """
    if not matmul_only:
        model.to(dtype)
        return
    for layer in model.modules():
        if type(layer) in _MULTIPLYING:
            layer.to(dtype)


def autocast(forward: Forward, device: torch.device, dtype: torch.dtype) -> Forward:
    """Wrap a function in torch.autocast, which is a setting of the calling thread."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return forward(*args, **kwargs)

    return run


def cast_inputs(
    forward: Forward, dtype: torch.dtype | None, *, channels_last: bool = False
) -> Forward:
    """Cast a function's floating-point arguments to ``dtype``; change the layout of images."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        target = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        if channels_last and tensor.dim() == _IMAGES:
            return tensor.to(target, memory_format=torch.channels_last)  # in one copy
        return tensor.to(target)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(cast, (args, kwargs))
        return forward(*args, **kwargs)

    return run


def raise_outputs(forward: Forward) -> Forward:
    """Convert a function's results of lower precision to fp32."""

    def as_fp32(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in _LOW else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(as_fp32, forward(*args, **kwargs))

    return run
