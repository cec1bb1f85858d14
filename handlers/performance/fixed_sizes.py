"""Batches of other sizes than a model was prepared for, filled up to one that it was.

The frontend pads batches to the compiled sizes; but of a batch with requests that the handler
refuses, only the others get this far. What fills is the last row again, and is cut off the result.

Only where the first dimension is that of the requests: shown by the batches of the warm-up, whose
sizes are known. A model that takes sequences first, or texts one after the other, is left alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from marserve.backend.context import Context
from marserve.handlers.performance.precision import Forward


@dataclass(frozen=True)
class BatchSizes:
    """How many requests batches have.

    Attributes:
        compiled: The only sizes there are; none, there is any up to ``most``.
        most: The largest.
    """

    compiled: tuple[int, ...]
    most: int

    @classmethod
    def of(cls, context: Context) -> "BatchSizes":
        """Read what the worker was told; a context made by hand may know nothing of it."""
        properties = context.system_properties
        compiled = tuple(sorted(properties.get("compiled_batch_sizes") or ()))
        return cls(compiled, int(properties.get("batch_size") or 1))

    @property
    def are_fixed(self) -> bool:
        """Whether there are such sizes only as somebody has chosen."""
        return bool(self.compiled)

    def to_compile(self) -> tuple[int, ...]:
        """The sizes to run so that torch.compile has met all that may come.

        It compiles size 1 apart, and at the second size that it meets for all others.
        """
        return self.compiled or tuple(sorted({1, min(2, self.most), self.most}))

    def to_record(self) -> tuple[int, ...]:
        """The sizes to run where all others are filled up to one of them: powers of two."""
        powers = (2**power for power in range(self.most.bit_length()))
        return self.compiled or tuple(sorted({*powers, self.most}))


class FixedSizes:
    """A function over batches, called with such numbers of rows only as it was warmed up with.

    Args:
        forward: The function.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._sizes: Sequence[int] = ()
        self._seen: set[int | None] = set()
        self._is_warming_up = True

    def end_warm_up(self, sizes: Iterable[int]) -> None:
        """End the warm-up, in which batches of just these sizes were run."""
        self._is_warming_up = False
        if self._seen == set(sizes):
            self._sizes = sorted(set(sizes))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; its result has as many rows as it was given."""
        rows = _rows(tree_leaves((args, kwargs)))
        if self._is_warming_up:
            self._seen.add(rows)
        size = next((one for one in self._sizes if rows is not None and one >= rows), rows)
        if rows is None or size is None or size == rows:
            return self._forward(*args, **kwargs)
        args, kwargs = tree_map(lambda one: _filled(one, size), (args, kwargs))
        return tree_map(lambda one: _cut(one, size, rows), self._forward(*args, **kwargs))


def _rows(leaves: Iterable[Any]) -> int | None:
    """The first dimension, where all tensors share it; of flat ones nobody knows what it is."""
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if not tensors or any(one.dim() < 2 for one in tensors):
        return None
    firsts = {len(one) for one in tensors}
    return firsts.pop() if len(firsts) == 1 else None


def _filled(one: Any, size: int) -> Any:
    if not isinstance(one, torch.Tensor):
        return one
    missing = size - len(one)
    return torch.cat([one, one[-1:].expand(missing, *one.shape[1:])])


def _cut(one: Any, size: int, rows: int) -> Any:
    is_of_batch = isinstance(one, torch.Tensor) and one.dim() > 0 and len(one) == size
    return one[:rows] if is_of_batch else one
