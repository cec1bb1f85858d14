"""Inputs that are made when they are sent to a worker, such as rows of one request in tensors.

Each row of tensors is a job, and adjacent rows are sent as one block.

The worker answers a block once (`backend.batch_run`): the job of its first row gets the answer, the
others `REST_OF_BLOCK`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from marserve.backend.protocol import Input, Part, Prediction


class Rows(Protocol):
    """The rows of a request."""

    def block(self, first: int, count: int) -> Input:
        """Return the input of ``count`` rows, for a worker."""


class LateInput(Input):
    """An input whose parts are returned by ``make`` when it is sent; before, they identify it."""

    __slots__ = ("make",)

    def __init__(
        self, id_: str, headers: dict[str, str], parts: list[Part], make: Callable[[], list[Part]]
    ) -> None:
        super().__init__(id_, headers, parts)
        self.make = make


class RowInput(Input):
    """The input of one row. Its parts, the bytes of its tensors, only identify its content.

    It is at ``place`` of the rows of ``source``. ``length`` is the one that the request would have
    with this row alone (`lengths.input_length`).
    """

    __slots__ = ("length", "place", "source")

    def __init__(
        self,
        id_: str,
        headers: dict[str, str],
        parts: list[Part],
        source: Rows,
        place: int,
        length: int,
    ) -> None:
        super().__init__(id_, headers, parts)
        self.source = source
        self.place = place
        self.length = length


#: The answer to a row whose answer is in that of an earlier row.
REST_OF_BLOCK = Prediction(b"")


def in_blocks(inputs: Sequence[Input], *, joined: bool = True) -> tuple[list[Input], Sequence[int]]:
    """Make the inputs of a batch; adjacent rows of tensors are ``joined`` into blocks.

    Return the inputs and the number of rows of each; without rows of tensors there are no numbers.
    """
    found: list[Input] = []
    rows: list[int] = []
    first: RowInput | None = None
    for each in inputs:
        row = each if type(each) is RowInput and joined else None
        if row and first and row.source is first.source and row.place == first.place + rows[-1]:
            rows[-1] += 1
        else:
            first = row
            made = Input(each.id, each.headers, each.make()) if type(each) is LateInput else each
            found.append(made)
            rows.append(1)
    if not any(type(each) is RowInput for each in found):
        return found, ()
    for at, each in enumerate(found):
        if type(each) is RowInput:
            found[at] = each.source.block(each.place, rows[at])
    return found, rows


def for_each_row(predictions: Sequence[Prediction], rows: Sequence[int]) -> list[Prediction]:
    """Return a prediction for each row, from predictions for blocks of ``rows`` rows."""
    found: list[Prediction] = []
    for prediction, count in zip(predictions, rows, strict=True):
        found.append(prediction)
        found += [REST_OF_BLOCK] * (count - 1)
    return found
