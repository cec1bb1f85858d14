"""Folds batch norms into the convolutions before them, which saves a pass over memory for each.

`torch.nn.utils.fusion` does the arithmetic (Jacob et al., arXiv 1712.05877, section 3.2). torch.fx
finds the pairs, in the submodules if it cannot trace the whole model. The model keeps its class and
``forward``; batch norms become ``nn.Identity``.

`torch.fx.experimental.optimization.fuse` (torch 2.15) returns a GraphModule without the model's
methods and hooks, cannot trace submodules separately, and is wrong if a convolution runs twice.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Graph, symbolic_trace
from torch.nn.utils.fusion import fuse_conv_bn_eval

from marserve.handlers.performance.weights import set_part

_NORM_AFTER: dict[type, type[Any]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


def fold_batch_norms(model: nn.Module) -> int:
    """Fold batch norms that are the only users of a convolution's result; return their number."""
    count = 0
    for part, graph in _traceable_parts(model):
        for conv_name, norm_name in _pairs(part, graph):
            conv: Any = part.get_submodule(conv_name)
            norm: Any = part.get_submodule(norm_name)
            is_transposed = "Transpose" in type(conv).__name__
            set_part(part, conv_name, fuse_conv_bn_eval(conv, norm, transpose=is_transposed))
            set_part(part, norm_name, nn.Identity())
            count += 1
    return count


def _traceable_parts(model: nn.Module) -> Iterator[tuple[nn.Module, Graph]]:
    """Yield the largest submodules that torch.fx can trace, and their graphs."""
    try:
        graph = symbolic_trace(model).graph
    except Exception:  # noqa: BLE001 - a forward may do anything with a proxy
        for child in model.children():
            yield from _traceable_parts(child)
    else:
        yield model, graph


def _pairs(part: nn.Module, graph: Graph) -> Iterator[tuple[str, str]]:
    """Yield the names of convolutions and of the batch norms that are their only users."""
    calls: list[Any] = [node for node in graph.nodes if node.op == "call_module"]
    times = Counter(node.target for node in calls)
    read = {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    modules: dict[str, Any] = dict(part.named_modules())
    for node in calls:
        source: Any = next(iter(node.all_input_nodes), None)
        if source not in calls or len(source.users) != 1:
            continue
        conv, norm = str(source.target), str(node.target)
        is_private = all(times[name] == 1 and name not in read for name in (conv, norm))
        if is_private and _can_fold(modules[conv], modules[norm]):
            yield conv, norm


def _can_fold(conv: Any, norm: Any) -> bool:
    if _NORM_AFTER.get(type(conv)) is not type(norm):
        return False
    if "Transpose" in type(conv).__name__ and conv.groups != 1:
        return False  # its weights have another layout
    if norm.training or norm.running_mean is None:  # uses the statistics of the batch
        return False
    return not any(getattr(layer, hooks) for layer in (conv, norm) for hooks in _HOOKS)
