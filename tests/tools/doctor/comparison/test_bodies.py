"""Whether two bodies say the same."""

import json

import pytest

from marserve.tools.bench.client import Answer
from marserve.tools.doctor.comparison.bodies import compare_bodies
from marserve.tools.doctor.comparison.forms import multipart, parts


def what(old: bytes | str, new: bytes | str, tolerance: float = 1e-4, ignored=(), types=("", "")):
    bodies = [each.encode() if isinstance(each, str) else each for each in (old, new)]
    answers = [
        Answer(200, body, {"content-type": kind} if kind else {})
        for body, kind in zip(bodies, types, strict=True)
    ]
    return compare_bodies(*answers, tolerance, ignored).what


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('{"y": 1.00001}', '{\n  "y": 1.00002\n}'),
        ('{"a": 1, "b": [2.0]}', '{"b": [2.0], "a": 1}'),
        ("1", "1.0"),
        ("NaN", "NaN"),
        ("tensor([0.12341, 3])", "tensor([0.12342, 3])"),
        ("cat 0.9 at 12:00", "cat 0.9 at 12:00"),
        (b"\xff\x00\x01", b"\xff\x00\x01"),
    ],
)
def test_the_same(old, new):
    assert what(old, new) == ""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('{"y": 1.0}', '{"y": 1.1}', "y: 1.0 and 1.1"),
        ('{"class": 1}', '{"class": 2}', "class: 1 and 2"),
        ("[1.0]", "[1.0, 2.0]", "the length: 1 and 2"),
        ("true", "1", "the answer: True and 1"),
        ("null", "0", "the answer: None and 0"),
        ("tensor([0.1])", "tensor([0.2])", "[0]: 0.1 and 0.2"),
        ("a cat", "a dog", "the text: 'a cat' and 'a dog'"),
        ("[1.0]", "oops", "the text: '[1.0]' and 'oops'"),
        (b"\xff\x00\x01", b"\xff\x00\x02", "3 bytes that differ from byte 2 on"),
        (b"\xff\x00", b"\xff\x00\x02", "2 and 3 bytes that are the same until one ends"),
        ("", b"\xff", "0 and 1 bytes"),
    ],
)
def test_not_the_same(old, new, words):
    assert words in what(old, new)


def test_the_tolerance_is_the_callers():
    assert what("[1.0]", "[1.1]", 0.2) == ""
    assert what("x=1.0", "x=1.1", 0.2) == ""
    assert what("[1.0]", "[1.0000001]", 0.0) != ""


def test_members_that_are_not_compared():
    old, new = ({"y": 1, "rows": [{"id": number, "y": 2}]} for number in (1, 2))
    assert what(json.dumps(old), json.dumps(new)) != ""
    assert what(json.dumps(old), json.dumps(new), ignored=["id"]) == ""


def test_parts_are_compared_one_by_one():
    def form(*numbers):
        return multipart([(f"p{at}", b"[%f]" % of, "application/json", "") for at, of in
                          enumerate(numbers)])  # fmt: skip

    (old, kind), (near, _), (far, _), (more, _) = (
        form(1.0, 2.0), form(1.0, 2.00001), form(1.0, 3.0), form(1.0)
    )  # fmt: skip
    other_boundary = kind.replace("marserve", "another")
    near = near.replace(b"--marserve", b"--another")
    assert what(old, near, types=(kind, other_boundary)) == ""
    assert what(old, far, types=(kind, kind)) == "p1: [0]: 2.0 and 3.0"
    assert "the parts" in what(old, more, types=(kind, kind))


def test_parts_within_a_part_are_its_content():
    def form(depth, content):
        heads = [
            f"--b{at}\r\nContent-Type: multipart/mixed; boundary=b{at + 1}\r\n\r\n"
            for at in range(depth)
        ]
        return "".join(heads) + content

    kind = "multipart/mixed; boundary=b0"
    for depth in (2, 1500):
        pair = [form(depth, content) for content in ("x=1.0", "x=1.1")]
        assert what(*pair, types=(kind, kind)).endswith("1.0 and 1.1"), depth
        assert what(*pair, 0.2, types=(kind, kind)) == "", depth


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"before\r\n--b\r\n\r\nx\r\n\r\ny\r\n--b-- \r\nafter\r\n--b\r\n", [b"x\r\n\r\ny"]),
        (b"--b\nContent-Transfer-Encoding: base64\n\neA==\n--b\n\n--bb\n--b--", [b"x", b"--bb"]),
        (b"--b\nno: end", [b""]),
        (b"--bb", None),
    ],
)
def test_where_parts_begin_and_end(body, expected):
    found = parts(body, "multipart/mixed; boundary=b")
    assert (found and [content for _, _, content in found]) == expected


@pytest.mark.parametrize("depth", [300, 700, 100_000])
def test_deep_nesting(depth):
    nested = "[" * depth + "]" * depth
    assert what(nested, nested.replace("[]", "[1]")) != ""


@pytest.mark.parametrize(
    "text", ["1" * 10_000, "x=" + "1" * 10_000, "1." + "1" * 10_000, "1e99999"]
)
def test_numbers_that_nobody_can_read(text):
    assert what(text, text + "2 cats") != ""
