"""Lines that are finished before they are logged: answers and metrics, many in one record.

Formatting a record for each of them would cost more than the answer they speak of. A record's
message is its lines, and its attribute ``entries`` is what they were made of, for formatters that
want them otherwise (`patterns`, `json_layouts`).
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from marserve.frontend.logs.setup import timestamp


class Entry(Protocol):
    """What becomes a line."""

    @property
    def at(self) -> float:
        """When, in seconds since the epoch."""

    @property
    def text(self) -> str:
        """What stands behind the time; has no line breaks."""

    @property
    def members(self) -> Mapping[str, Any]:
        """The same for a line that is a JSON object."""


def log_entries(logger: logging.Logger, entries: Sequence[Entry], *, as_json: bool) -> None:
    """Log entries as one record, if the logger lets INFO through.

    The record is made without looking for the caller, which costs more than a line.
    """
    if not entries or not logger.isEnabledFor(logging.INFO):
        return
    lines: Iterable[str] = map(json_line if as_json else text_line, entries)
    text, extra = "\n".join(lines), {"entries": entries}
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None, extra=extra))


def text_line(entry: Entry) -> str:
    """TorchServe's line."""
    return f"{timestamp(entry.at)} - {entry.text}"


def json_line(entry: Entry) -> str:
    """A JSON object on one line."""
    return json.dumps(entry.members, ensure_ascii=False)
