import itertools

from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.protocol import Input, Prediction
from marserve.frontend.batching.rows import REST_OF_BLOCK, RowInput, for_each_row, in_blocks


class Source:
    """Rows of a request, whose blocks say which they are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def block(self, first: int, count: int) -> Input:
        return Input(f"{self.name} {first}+{count}", {}, [])


@given(st.lists(st.tuples(st.sampled_from("abc-"), st.integers(0, 4))))
def test_blocks_are_neighbours_of_one_request_and_hold_all_rows(batch):
    sources = {name: Source(name) for name in "abc"}
    inputs = [
        Input("plain", {}, [])
        if name == "-"
        else RowInput(f"{name}.{place}", {}, [], sources[name], place, 1)
        for name, place in batch
    ]
    found, rows = in_blocks(inputs)
    if all(name == "-" for name, _ in batch):
        assert (found, rows) == (inputs, ())
        return
    assert sum(rows) == len(inputs)
    again = []
    for each, count in zip(found, rows, strict=True):
        if each.id == "plain":
            again.append(("-", 0))
            assert count == 1
            continue
        name, _, numbers = each.id.partition(" ")
        first, told = map(int, numbers.split("+"))
        assert told == count
        again += [(name, place) for place in range(first, first + count)]
    assert again == [(name, 0 if name == "-" else place) for name, place in batch]
    for before, after in itertools.pairwise(found):
        if before.id != "plain" and after.id != "plain" and before.id[0] == after.id[0]:
            end = sum(map(int, before.id[2:].split("+")))
            assert int(after.id[2:].partition("+")[0]) != end  # else it were one block


def test_the_first_row_of_a_block_has_its_answer():
    a, b = Prediction(b"a"), Prediction(b"b")
    rest = REST_OF_BLOCK
    assert for_each_row([a, b], [1, 3]) == [a, b, rest, rest]
