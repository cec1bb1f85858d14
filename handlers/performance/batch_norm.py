"""Folds batch norms into the convolutions before them, which saves a pass over memory for each.

In evaluation a batch norm multiplies and adds per channel, which the convolution's weights and bias
can do on the way. ``w' = w * g / sqrt(v + eps)`` and ``b' = (b - m) * g / sqrt(v + eps) + beta``
(Jacob et al., arXiv 1712.05877, section 3.2; `torch.nn.utils.fusion` has the arithmetic).

Where the pairs are, torch.fx's tracing finds out. Of a model that it cannot follow, because its
path depends on the data, the parts are tried one by one. The model itself stays the object that it
was, with its own ``forward``: a batch norm is merely replaced by nothing.

Why not `torch.fx.experimental.optimization.fuse`: it gives a GraphModule, without the model's
class, methods and hooks; it cannot take a model apart that it cannot trace, knows no transposed
convolutions, and gives other results where a convolution runs twice (torch 2.15).
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.fx import Graph, symbolic_trace
from torch.nn.utils.fusion import fuse_conv_bn_eval

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
    """Fold every batch norm that alone uses a convolution's result; returns how many there were.

    The model is in evaluation mode, and changed in place.
    """
    count = 0
    for part, graph in _traceable_parts(model):
        for conv_name, norm_name in _pairs(part, graph):
            conv: Any = part.get_submodule(conv_name)
            norm: Any = part.get_submodule(norm_name)
            is_transposed = "Transpose" in type(conv).__name__
            _replace(part, conv_name, fuse_conv_bn_eval(conv, norm, transpose=is_transposed))
            _replace(part, norm_name, nn.Identity())
            count += 1
    return count


def _traceable_parts(model: nn.Module) -> Iterator[tuple[nn.Module, Graph]]:
    """The largest modules within a model that torch.fx can follow, with what it saw."""
    try:
        graph = symbolic_trace(model).graph
    except Exception:  # noqa: BLE001 - whatever a forward does with what is no tensor
        for child in model.children():
            yield from _traceable_parts(child)
    else:
        yield model, graph


def _pairs(part: nn.Module, graph: Graph) -> Iterator[tuple[str, str]]:
    """Names of convolutions, each with that of the batch norm that alone uses its result."""
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
        return False  # its weights are laid out in another way
    if norm.training or norm.running_mean is None:  # it works with the batch's own statistics
        return False
    return not any(getattr(layer, hooks) for layer in (conv, norm) for hooks in _HOOKS)


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)
