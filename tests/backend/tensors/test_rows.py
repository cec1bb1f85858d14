import pytest

from marserve.backend.tensors.datatypes import UnusableTensor
from marserve.backend.tensors.rows import Output, OutputJoiner


def output(name: str = "y", datatype: str = "INT8", shape: tuple[int, ...] = (1, 2)) -> Output:
    return Output(name, datatype, [*shape], bytes(shape[0] * shape[1]))


def test_outputs_of_rows_are_joined():
    joiner = OutputJoiner(0)
    joiner.add([Output("y", "INT8", [1, 2], b"ab")], 1)
    joiner.add([Output("y", "INT8", [2, 2], b"cdef")], 2)
    assert joiner.joined() == [Output("y", "INT8", [3, 2], b"abcdef")]


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ([output("z")], "some rows have the outputs y, and others z"),
        ([], "and others none"),
        ([output(shape=(2, 2))], "output 'y' has the shape [2, 2] for 1 row: its dimension 0"),
        ([output(shape=(1, 3))], "output 'y' is INT8 [1, 2] for some rows, and INT8 [1, 3]"),
        ([output(datatype="UINT8")], "and UINT8 [1, 2] for others"),
        ([Output("y", "INT8", [], b"")], "has the shape [], and no dimension 0"),
    ],
)
def test_outputs_that_differ_are_refused(outputs, sentence):
    joiner = OutputJoiner(0)
    joiner.add([output()], 1)
    with pytest.raises(UnusableTensor) as caught:
        joiner.add(outputs, 1)
    assert sentence in str(caught.value)
