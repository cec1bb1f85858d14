"""Java's properties, the syntax of config.properties and of snapshots."""

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.configuration.properties import (
    ConfigError,
    format_properties,
    parse_properties,
    read_entries,
)

LIMITS = Limits(calls=1_000, calls_per_byte=20)


def target(data: bytes) -> None:
    """What was read and is written again is read as the same."""
    text = data.decode("latin-1") if data[:1] == b"\xff" else data.decode("utf-8", "replace")
    try:
        entries = read_entries(text)
    except ConfigError as error:
        check_refusal(error)
        return
    lines = text.count("\n") + text.count("\r") + 1
    assert [entry.line for entry in entries] == sorted({entry.line for entry in entries})
    assert all(1 <= entry.line <= lines for entry in entries)
    properties = parse_properties(text)
    stripped = {key: value for key, value in properties.items() if key}
    assert parse_properties(format_properties(stripped, ["a comment"])) == stripped
