"""Cuts a model into parts that run one after the other.

torch.fx traces the model: unlike torch.export and torch.distributed.pipelining it needs no example
of the inputs, which is not there while the model loads, and keeps the modules with their weights.
Modules that it cannot trace stay whole.

A cut transfers the values that are made before it and read after it. The cuts with the fewest
values are used: for ResNet the ends of its blocks. Sizes of values are unknown without an example.
A weight that is read in several places is in one part.
"""

import functools
import inspect
import itertools
from collections.abc import Sequence
from operator import getitem
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer

from marserve.backend.errors import sentence_of

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class NotCuttable(Exception):
    """A model cannot be cut; the message is the reason."""


class _NotTraceable(Exception):
    """The module and its error, for a message."""


class _OneInput(nn.Module):
    """A model whose other arguments have their defaults."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, argument: Any) -> Any:
        """Run the model without its hooks: they run around the stages."""
        return self.model.forward(argument)


class _Tracer(Tracer):
    """Stops at the innermost module that cannot be traced; modules in ``whole`` are not entered."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: dict[nn.Module, _NotTraceable] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the graph."""
        return m in self.whole or super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace the call of a module."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except _NotTraceable:
            raise
        except Exception as error:  # a forward may do anything with a proxy
            path, kind = self.path_of_module(m).partition(".")[2], type(m).__name__
            self.whole[m] = _NotTraceable(f"{path} ({kind}): {sentence_of(error)}")
            raise self.whole[m] from error


def cut_model(model: nn.Module, parts: int) -> list[nn.Module]:
    """Return the parts of a model, with parameters spread evenly; raises NotCuttable.

    The first part takes the argument of the model, others what the part before it returns.
    """
    root, tracer = _OneInput(model), _Tracer()
    graph = _traced(root, tracer)
    source, *nodes, output = graph.nodes
    live = _live_values(source, nodes, output)
    weights = [_weights_of(root, node) for node in nodes]
    cuts = _possible_cuts(weights)
    if len(cuts) < parts - 1:
        why = "".join(f"; not traced: {reason}" for reason in tracer.whole.values())
        raise NotCuttable(
            f"{type(model).__name__} has {len(cuts) + 1} parts for {parts} devices{why}"
        )
    fewest = sorted(len(live[cut]) for cut in cuts)[parts - 2]
    bounds = [0, *(cut for cut in cuts if len(live[cut]) <= fewest), len(nodes)]
    sizes = [
        sum({key: size for each in weights[begin:end] for key, size in each.items()}.values())
        for begin, end in itertools.pairwise(bounds)
    ]
    chosen = [0, *(bounds[place] for place in balanced_bounds(tuple(sizes), parts)), len(nodes)]
    return [
        _part(
            root,
            nodes[begin:end],
            live[begin] if begin else source,
            live[end] if end < len(nodes) else output,
        )
        for begin, end in itertools.pairwise(chosen)
    ]


@functools.cache
def balanced_bounds(weights: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Return where the second and later parts begin, so that the heaviest one is lightest."""
    if parts == 1:
        return ()

    def heaviest(bounds: tuple[int, ...]) -> int:
        edges = (0, *bounds, len(weights))
        return max(sum(weights[begin:end]) for begin, end in itertools.pairwise(edges))

    lasts = range(parts - 1, len(weights))
    return min(
        ((*balanced_bounds(weights[:last], parts - 1), last) for last in lasts), key=heaviest
    )


def _traced(root: _OneInput, tracer: _Tracer) -> Graph:
    name = type(root.model).__name__
    parameters = inspect.signature(root.model.forward).parameters.values()
    taken = [each.kind for each in parameters if each.default is each.empty]
    if len(taken) != 1 or taken[0] not in _POSITIONAL:
        raise NotCuttable(f"{name} does not take exactly one input")
    while True:
        try:
            return tracer.trace(root)
        except _NotTraceable:
            continue  # without entering the module
        except Exception as error:  # a forward may do anything with a proxy
            raise NotCuttable(f"{name} cannot be traced: {sentence_of(error)}") from error


def _live_values(source: Node, nodes: Sequence[Node], output: Node) -> list[list[Node]]:
    """Return the values that are read at or behind each place, and made before it."""
    place_of = {node: place for place, node in enumerate([*nodes, output])}
    live: list[list[Node]] = [[] for _ in range(len(nodes) + 1)]
    for made, node in enumerate([source, *nodes]):
        last_read = max((place_of[user] for user in node.users), default=0)
        for place in range(made, last_read + 1):
            live[place].append(node)
    return live


def _weights_of(root: nn.Module, node: Node) -> dict[int, int]:
    """Return the elements of each tensor of the model that a node reads, by its identity."""
    tensors: list[Any] = []
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        tensors += itertools.chain(module.parameters(), module.buffers())
    for each in (node, *node.all_input_nodes):
        if each.op == "get_attr":
            owner, _, name = str(each.target).rpartition(".")
            tensors.append(getattr(root.get_submodule(owner), name))
    return {id(tensor): tensor.numel() for tensor in tensors}


def _possible_cuts(weights: Sequence[dict[int, int]]) -> list[int]:
    """Return the places between nodes that do not read the same weight."""
    lasts = {key: place for place, each in enumerate(weights) for key in each}
    cuts, together = [], 0
    for place, each in enumerate(weights):
        if place > together:
            cuts.append(place)
        together = max([together, *(lasts[key] for key in each)])
    return cuts


def _part(
    root: nn.Module,
    nodes: Sequence[Node],
    taken: Sequence[Node] | Node,
    given: Sequence[Node] | Node,
) -> nn.Module:
    """Return a module of some nodes; between parts there are tuples of values."""
    graph = Graph()
    argument = graph.placeholder("argument")
    copies: dict[Node, Node] = {}
    if isinstance(taken, Node):
        copies[taken] = argument
    else:
        for place, node in enumerate(taken):
            copies[node] = graph.call_function(getitem, (argument, place))
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if isinstance(given, Node):
        graph.node_copy(given, copies.__getitem__)
    else:
        graph.output(tuple(copies[node] for node in given))
    return GraphModule(root, graph)
