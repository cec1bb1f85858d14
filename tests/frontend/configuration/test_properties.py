import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from marserve.frontend.configuration.properties import (
    ConfigError,
    format_properties,
    parse_properties,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": "1"}),
        ("a: 1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("a\t=\t1", {"a": "1"}),
        ("a = b = c", {"a": "b = c"}),
        ("a=http://127.0.0.1:8080", {"a": "http://127.0.0.1:8080"}),
        ("a=true  ", {"a": "true"}),
        ("a", {"a": ""}),
        ("a=", {"a": ""}),
        ("# a=1\n  ! b=2\n\n \t\nc=3", {"c": "3"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("a=1\na=2", {"a": "2"}),
        ("a={\\\n   1,\\\n   2}", {"a": "{1,2}"}),
        ("a=1\\\n# no comment", {"a": "1# no comment"}),
        ("a=1\\", {"a": "1"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        (r"a\:b\=c\ d=1", {"a:b=c d": "1"}),
        (r"a=x\ty\nz", {"a": "x\ty\nz"}),
        (r"a=\u00e4\q", {"a": "äq"}),
        (r"a=\ud83d\ude00", {"a": "😀"}),
        ("a=x\u2028y\x0bz", {"a": "x\u2028y\x0bz"}),
    ],
)
def test_reads_the_syntax_of_java_properties(text, expected):
    assert parse_properties(text) == expected


@pytest.mark.parametrize("text", [r"a=\u12", r"a=\uzzzz", r"a=\ud83d"])
def test_an_escape_that_is_no_character_is_refused(text):
    with pytest.raises(ConfigError, match="Invalid configuration"):
        parse_properties(text)


@given(st.text())
@example("\\")
@example("a=\\\r")
def test_any_text_is_read_or_refused(text):
    try:
        entries = parse_properties(text)
    except ConfigError:
        return
    assert all(part == part.strip() for entry in entries.items() for part in entry)


def _escaped(text: str) -> str:
    units = text.encode("utf-16-be")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


_STRIPPED = st.text().map(str.strip)


@given(st.dictionaries(_STRIPPED, _STRIPPED))
def test_what_was_written_with_escapes_is_read_back(entries):
    text = "\n".join(f"{_escaped(key)}={_escaped(value)}" for key, value in entries.items())
    assert parse_properties(text) == entries


_PLAIN = st.text(st.characters(codec="ascii", exclude_characters="\\\r\n"), min_size=1).map(
    str.strip
)


@given(st.from_regex(r"[a-z_]+", fullmatch=True), _PLAIN)
def test_plain_values_need_no_escapes(key, value):
    assert parse_properties(f"{key}={value}") == {key: value}


# -- and back --------------------------------------------------------------------------------------


def test_properties_are_written_as_java_writes_them():
    entries = {"a b": "x = y", "url": "http://h:1", "c#": "\\ \t\n!", "ü": "\N{GRINNING FACE}"}
    assert format_properties(entries, ["Saving snapshot"]) == (
        "#Saving snapshot\n"
        "a\\ b=x \\= y\n"
        "url=http\\://h\\:1\n"
        "c\\#=\\\\ \\t\\n\\!\n"
        "\\u00FC=\\uD83D\\uDE00\n"
    )


TEXT = st.text(st.characters(exclude_categories=["Cs"])).map(str.strip)


@given(st.dictionaries(TEXT.filter(bool), TEXT))
def test_what_was_written_is_read_again(entries):
    assert parse_properties(format_properties(entries, ["comment"])) == entries
