"""Tensors nested in dicts, lists and tuples: arguments and results of models.

torch has the same functions under private names only.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Copy a structure with every tensor replaced; containers keep their types."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        copied = copy.copy(tree)
        for key, value in tree.items():
            copied[key] = map_tensors(function, value)
        return copied
    if isinstance(tree, list | tuple):
        values = [map_tensors(function, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a structure in order."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from tensors_of(value)
