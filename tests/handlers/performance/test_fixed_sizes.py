from typing import Any

import pytest
import torch

from marserve.handlers.performance.fixed_sizes import BatchSizes, FixedSizes


class Spy:
    """Adds 1 to rows and stores their number."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: torch.Tensor, **more: Any) -> Any:
        self.rows.append(len(x))
        return {"out": x + 1, "count": torch.tensor(len(x)), "label": "same"}


def warmed_up(*sizes: int, shapes: list[tuple[int, ...]] | None = None) -> tuple[Spy, FixedSizes]:
    spy = Spy()
    fixed = FixedSizes(spy)
    for shape in shapes or [(size, 3) for size in sizes]:
        fixed(torch.zeros(shape))
    fixed.end_warm_up(sizes)
    spy.rows.clear()
    return spy, fixed


@pytest.mark.parametrize(("rows", "ran"), [(1, 1), (2, 4), (3, 4), (4, 4), (7, 8), (9, 9)])
def test_a_batch_is_filled_up_to_the_next_size(rows, ran):
    spy, fixed = warmed_up(1, 4, 8)
    x = torch.arange(rows * 3.0).reshape(rows, 3)
    result = fixed(x, mask=torch.ones(rows, 2), flag=True)
    assert spy.rows == [ran]
    assert torch.equal(result["out"], x + 1)
    assert result["label"] == "same"


def test_batches_of_the_warm_up_are_not_filled_up():
    spy = Spy()
    fixed = FixedSizes(spy)
    fixed(torch.zeros(3, 2))
    assert spy.rows == [3]


@pytest.mark.parametrize(
    "shapes",
    [[(7, 1), (7, 4)], [(2, 3), (2, 3)], [(1,), (4,)]],
    ids=["sequences first", "micro-batches", "flat"],
)
def test_batches_without_a_row_per_request_are_not_filled_up(shapes):
    spy, fixed = warmed_up(1, 4, shapes=shapes)
    fixed(torch.zeros(3, 2))
    assert spy.rows == [3]


def test_tensors_of_different_lengths_are_not_filled_up():
    spy, fixed = warmed_up(1, 4)
    fixed(torch.zeros(3, 2), offsets=torch.zeros(2, 2))
    fixed(torch.zeros(3, 2), offsets=torch.zeros(3))
    assert spy.rows == [3, 3]


@pytest.mark.parametrize(
    ("compiled", "max_size", "to_compile", "to_record"),
    [
        ((), 1, (1,), (1,)),
        ((), 2, (1, 2), (1, 2)),
        ((), 6, (1, 2, 6), (1, 2, 4, 6)),
        ((), 8, (1, 2, 8), (1, 2, 4, 8)),
        ((2, 8), 8, (2, 8), (2, 8)),
    ],
)
def test_the_sizes_of_the_warm_up(compiled, max_size, to_compile, to_record):
    sizes = BatchSizes(compiled, max_size)
    assert (sizes.to_compile(), sizes.to_record()) == (to_compile, to_record)
