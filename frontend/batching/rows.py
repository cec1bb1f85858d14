"""Rows of one request in tensors: a job each, which travel together where they follow each other.

The queue, the policies, and the splitting of a failed batch know single rows. On the way to a
worker neighbours of one request become one block, and its one answer (`backend.batch_run`) becomes
the answers of as many jobs again: the first gets it, and the others `REST_OF_BLOCK`.
"""

from collections.abc import Sequence
from typing import Protocol

from marserve.backend.protocol import Input, Part, Prediction


class Rows(Protocol):
    """The rows of a request."""

    def block(self, first: int, count: int) -> Input:
        """The input of this many rows, as a worker gets it."""


class RowInput(Input):
    """The input of one row; its parts are the bytes of its tensors, to be told from others by.

    ``length`` is what `input_length` would say of it if it were no row of many.
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


#: The answer to a row that is in the answer to a row before it.
REST_OF_BLOCK = Prediction(b"")


def in_blocks(inputs: Sequence[Input]) -> tuple[list[Input], Sequence[int]]:
    """The inputs of a batch with neighbours as blocks, and how many rows each of them is.

    No numbers where no rows of tensors are among them.
    """
    found: list[Input] = []
    rows: list[int] = []
    first: RowInput | None = None
    for each in inputs:
        if type(each) is not RowInput:
            first = None
            found.append(each)
            rows.append(1)
        elif first and each.source is first.source and each.place == first.place + rows[-1]:
            rows[-1] += 1
        else:
            first = each
            found.append(each)
            rows.append(1)
    if not any(type(each) is RowInput for each in found):
        return found, ()
    for at, each in enumerate(found):
        if type(each) is RowInput:
            found[at] = each.source.block(each.place, rows[at])
    return found, rows


def for_each_row(predictions: Sequence[Prediction], rows: Sequence[int]) -> list[Prediction]:
    """A prediction for each row, of those for blocks of so many rows."""
    found: list[Prediction] = []
    for prediction, count in zip(predictions, rows, strict=True):
        found.append(prediction)
        found += [REST_OF_BLOCK] * (count - 1)
    return found
