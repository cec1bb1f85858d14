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

from marserve.backend.context import Context
from marserve.handlers.performance.precision import Forward
from marserve.handlers.performance.trees import map_tensors, tensors_of


@dataclass(frozen=True)
class BatchSizes:
    """How many requests batches have: the compiled sizes only, or any up to the largest."""

    compiled: tuple[int, ...]
    max_size: int

    @classmethod
    def of(cls, context: Context) -> "BatchSizes":
        """Read them from a context; one made by hand may not have them."""
        properties = context.system_properties
        compiled = tuple(sorted(properties.get("compiled_batch_sizes") or ()))
        return cls(compiled, int(properties.get("batch_size") or 1))

    def to_compile(self) -> tuple[int, ...]:
        """The sizes to run so that torch.compile has met all that may come.

        It compiles size 1 apart, and at the second size that it meets for all others.
        """
        return self.compiled or tuple(sorted({1, min(2, self.max_size), self.max_size}))

    def to_record(self) -> tuple[int, ...]:
        """The sizes to run where all others are filled up to one of them: powers of two."""
        powers = (2**power for power in range(self.max_size.bit_length()))
        return self.compiled or tuple(sorted({*powers, self.max_size}))


class FixedSizes:
    """A function over batches, called with such numbers of rows only as it was warmed up with."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._sizes: Sequence[int] = ()
        self._seen: set[int | None] = set()
        self._is_warming_up = True

    def end_warm_up(self, sizes: Iterable[int]) -> str:
        """End the warm-up, in which batches of just these sizes were run.

        Returns what becomes of batches of other sizes.
        """
        self._is_warming_up = False
        if self._seen != set(sizes):
            return "run as they are: the first dimension is not that of the requests"
        self._sizes = sorted(set(sizes))
        return "filled up to these"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; its result has as many rows as it was given."""
        rows = _rows(list(tensors_of((args, kwargs))))
        if self._is_warming_up:
            self._seen.add(rows)
        size = next((size for size in self._sizes if rows is not None and size >= rows), rows)
        if rows is None or size is None or size == rows:
            return self._forward(*args, **kwargs)
        args, kwargs = map_tensors(lambda tensor: _filled(tensor, size), (args, kwargs))
        return map_tensors(lambda tensor: _cut(tensor, size, rows), self._forward(*args, **kwargs))


def _rows(tensors: Sequence[torch.Tensor]) -> int | None:
    """The first dimension, where all tensors share it; of flat ones nobody knows what it is."""
    if not tensors or any(tensor.dim() < 2 for tensor in tensors):
        return None
    firsts = {len(tensor) for tensor in tensors}
    return firsts.pop() if len(firsts) == 1 else None


def _filled(tensor: torch.Tensor, size: int) -> torch.Tensor:
    return torch.cat([tensor, tensor[-1:].expand(size - len(tensor), *tensor.shape[1:])])


def _cut(tensor: torch.Tensor, size: int, rows: int) -> torch.Tensor:
    return tensor[:rows] if tensor.dim() > 0 and len(tensor) == size else tensor
