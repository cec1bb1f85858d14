"""A model in another precision or memory layout, for callers that notice nothing of it.

Two kinds of casting, as AWS Neuron has them (``--auto-cast all`` and ``matmult``):

* all      weights, buffers and everything that flows are of the lower precision.
* matmul   only what is multiplied is: torch.autocast. Inputs, sums of them, and the weights of
           norms and embeddings stay in fp32.

What goes in is cast here, and what comes out is fp32 again, since postprocessing counts on it:
numpy knows no bfloat16, a softmax over bf16 tells a thousand classes apart by two digits, and
clients would see other types than they are used to.
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
    """Cast a model's weights in place.

    With ``matmul_only`` those of layers that multiply: autocast would else cast them anew in every
    batch, a tenth of the time of ResNet-152 on a CPU for a single image, and hold both versions.
    Layers of derived classes are left to it, for they may use their weights in other ways.
    """
    if not matmul_only:
        model.to(dtype)
        return
    for layer in model.modules():
        if type(layer) in _MULTIPLYING:
            layer.to(dtype)


def autocast(forward: Forward, device: torch.device, dtype: torch.dtype) -> Forward:
    """Have what a function multiplies cast, in whatever thread it is called."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype):
            return forward(*args, **kwargs)

    return run


def cast_inputs(
    forward: Forward, dtype: torch.dtype | None, *, channels_last: bool = False
) -> Forward:
    """Cast the tensors of floating point that a function is called with, however nested.

    None as dtype leaves the type as it is; ``channels_last`` lays images out pixel by pixel.
    """

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
    """Give back what a function returns in a lower precision as fp32, however nested."""

    def as_fp32(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in _LOW else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(as_fp32, forward(*args, **kwargs))

    return run
