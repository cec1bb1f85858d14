import pytest

from marserve.backend.padding import padded, repeats, without_padding
from marserve.backend.protocol import Input, Part


def make_input(id_: str, *bodies: bytes) -> Input:
    parts = [Part(f"part-{i}", "text/plain", each) for i, each in enumerate(bodies)]
    return Input(id_, {"a": "b"}, parts)


def test_the_last_input_is_repeated_up_to_the_size() -> None:
    first, last = make_input("1", b"x"), make_input("2", b"y", b"z")
    filled = padded([first, last], 5)
    assert filled[:2] == [first, last]
    assert [(each.headers, each.parts) for each in filled[2:]] == [(last.headers, last.parts)] * 3
    assert len({each.id for each in filled}) == 5


def test_a_repeat_has_bodies_of_its_own() -> None:
    original = make_input("1", bytearray(b"x"))
    first, second = repeats(original, ["a", "b"])
    first.parts[0].body += b"changed"
    assert (original.parts[0].body, second.parts[0].body) == (b"x", b"x")
    assert (first.id, second.id) == ("a", "b")


def row(*ids: str) -> list[object]:
    return ["counter", "N", "Count", 1.0, [["Level", "Model"]], list(ids)]


@pytest.mark.parametrize("real", [[], ["1"], ["padding-0"], ["1", "2"]])
def test_ids_of_padding_are_taken_out_of_metrics(real: list[str]) -> None:
    ours = [each.id for each in padded([make_input("1")], 3)[1:]]
    mixed = [row(*real, *ours)] if real else []
    assert without_padding([row(*real), row(*ours), *mixed]) == [row(*real)] * (1 + len(mixed))
