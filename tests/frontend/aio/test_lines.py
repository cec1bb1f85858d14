"""Lines of output that arrives in parts."""

from hypothesis import given
from hypothesis import strategies as st

from marserve.frontend.aio.lines import MAX_LINE_BYTES, LineCutter


def cut_all(parts: list[bytes]) -> list[str]:
    cutter = LineCutter()
    found = [line for part in parts for line in cutter.cut(part)]
    return found + cutter.cut(b"", is_last=True)


@given(st.lists(st.text("ab\r\nü", max_size=6)))
def test_lines_are_the_same_however_they_arrive(texts):
    whole = "".join(texts).encode()
    assert cut_all([whole[at : at + 1] for at in range(len(whole))]) == cut_all([whole])
    lines = whole.decode().split("\n")
    expected = [line.rstrip("\r") for line in (lines if lines[-1] else lines[:-1])]
    assert cut_all([whole]) == expected


def test_a_line_without_end_is_cut():
    lines = cut_all([b"x" * MAX_LINE_BYTES] * 4 + [b"\nend"])
    assert "".join(lines[:-1]) == "x" * 4 * MAX_LINE_BYTES
    assert max(map(len, lines)) <= 2 * MAX_LINE_BYTES
    assert lines[-1] == "end"


def test_what_is_not_text_is_escaped():
    assert cut_all([b"a\xff\xfe\n", b"\x80"]) == ["a\\xff\\xfe", "\\x80"]
