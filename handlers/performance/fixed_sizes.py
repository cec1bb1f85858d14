"""Fills batches up to a size that the model was warmed up for.

The frontend pads batches to the compiled sizes, but the handler may refuse some of the requests.
Rows are filled with copies of the last one and removed from the result. This is done only if the
first dimension of the warm-up's batches was their size: models may take sequences first, or
concatenated texts.
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
    """The sizes of batches: the compiled sizes if any, else 1 to ``max_size``."""

    compiled: tuple[int, ...]
    max_size: int

    @classmethod
    def of(cls, context: Context) -> "BatchSizes":
        """Return the sizes of a context."""
        properties = context.system_properties
        compiled = tuple(sorted(properties.get("compiled_batch_sizes") or ()))
        return cls(compiled, int(properties.get("batch_size") or 1))

    def to_compile(self) -> tuple[int, ...]:
        """Return the sizes to run so that torch.compile compiles for all sizes."""
        # It specialises for size 1, and generalises at the second of the others.
        return self.compiled or tuple(sorted({1, min(2, self.max_size), self.max_size}))

    def to_record(self) -> tuple[int, ...]:
        """Return the sizes to record, to which others are filled up: powers of two."""
        powers = (2**power for power in range(self.max_size.bit_length()))
        return self.compiled or tuple(sorted({*powers, self.max_size}))


class FixedSizes:
    """A function over batches that is called only with the numbers of rows of its warm-up."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._sizes: Sequence[int] = ()
        self._seen: set[int | None] = set()
        self._is_warming_up = True

    def end_warm_up(self, sizes: Iterable[int]) -> str:
        """End the warm-up with batches of these sizes; return how other sizes will run."""
        self._is_warming_up = False
        if self._seen != set(sizes):
            return "run as they are: the first dimension is not that of the requests"
        self._sizes = sorted(set(sizes))
        return "filled up to these"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; the result has as many rows as the arguments."""
        rows = _rows(list(tensors_of((args, kwargs))))
        if self._is_warming_up:
            self._seen.add(rows)
        size = next((size for size in self._sizes if rows is not None and size >= rows), rows)
        if rows is None or size is None or size == rows:
            return self._forward(*args, **kwargs)
        args, kwargs = map_tensors(lambda tensor: filled(tensor, size), (args, kwargs))
        return map_tensors(lambda tensor: _cut(tensor, size, rows), self._forward(*args, **kwargs))


def filled(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Fill a tensor up to ``size`` rows with copies of its last row."""
    return torch.cat([tensor, tensor[-1:].expand(size - len(tensor), *tensor.shape[1:])])


def _rows(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the common first dimension; None if they differ, or a tensor has no second one."""
    if not tensors or any(tensor.dim() < 2 for tensor in tensors):
        return None
    firsts = {len(tensor) for tensor in tensors}
    return firsts.pop() if len(firsts) == 1 else None


def _cut(tensor: torch.Tensor, size: int, rows: int) -> torch.Tensor:
    return tensor[:rows] if tensor.dim() > 0 and len(tensor) == size else tensor
