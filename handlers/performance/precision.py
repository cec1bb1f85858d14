"""Runs a model in another precision or memory layout, with inputs and outputs unchanged.

* all      weights, buffers and activations have the lower precision.
* matmul   weights and inputs of matrix products and convolutions have it; results and the rest are
           fp32. torch.autocast casts the inputs. It leaves results in the lower precision, in which
           a CPU computes what follows: GELU, norms and softmax, and the relative error is that of
           ``all`` (encoder of 6 layers: 0.0075, with fp32 results 0.0028). On other devices
           autocast runs norms and softmax in fp32 itself.

Outputs are fp32 again: numpy lacks bfloat16, and a softmax in bf16 has two significant digits.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
_ATTENTION = "multi_head_attention_forward"
#: Functions whose inputs autocast lowers. Dynamo compares names, but not the functions of a set.
_PRODUCTS = frozenset(
    (
        *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "chain_matmul"),
        *("conv1d", "conv2d", "conv3d", "conv_tbc"),
        *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("einsum", "gru", "linear", "lstm", "matmul", "mm", "multi_dot", "mv", "rnn_relu"),
        *("rnn_tanh", "scaled_dot_product_attention", "tensordot", "__matmul__", "__rmatmul__"),
        _ATTENTION,
    )
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


class _RaisedProducts(TorchFunctionMode):
    """Converts results of products to fp32, in the calling thread, inside a ``with`` block."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch."""
        del types
        name = getattr(func, "__name__", "")
        if name == _ATTENTION:
            args = (*_contiguous(args[:3]), *args[3:])
        result = func(*args, **(kwargs or {}))
        return map_tensors(_as_fp32, result) if name in _PRODUCTS else result


def _contiguous(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy the inputs of an attention; equal ones stay one object, which has one product.

    Of a transposed input torch multiplies each row with a copy of the weights: 17 times as slow.
    """
    copies = {id(tensor): tensor.contiguous() for tensor in tensors}
    return [copies[id(tensor)] for tensor in tensors]


def autocast(forward: Forward, device: torch.device, dtype: torch.dtype) -> Forward:
    """Wrap a function so that products have ``dtype``; torch has such modes per thread."""
    is_cpu = device.type == "cpu"
    raised = _RaisedProducts if is_cpu else nullcontext
    if is_cpu:
        # Torch's own encoder layer, which compiled code calls, runs in one precision as a whole.
        torch.backends.mha.set_fastpath_enabled(False)

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=dtype), raised():
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

    def run(*args: Any, **kwargs: Any) -> Any:
        return map_tensors(_as_fp32, forward(*args, **kwargs))

    return run


def _as_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in _LOW else tensor
