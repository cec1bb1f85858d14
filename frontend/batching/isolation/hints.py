"""How reliable the hints of tracebacks are, by the line that raised.

A hint names the request whose data a handler held when it raised (`backend.suspects`). It may be
wrong: the variable of a loop that has ended still holds the last row. So a hint only sets the order
in which a failed batch is run again.

The named request fails without a run alone if its line has named the cause every time, and the
request has then failed at the same line alone; one in eight runs alone all the same. A line that
was wrong once is not believed again, and none is while most requests fail (`splitting`).
"""

from collections import OrderedDict
from dataclasses import dataclass

_CAPACITY = 64
# A line's hints are followed while they are right this many times as often as wrong.
_RIGHT_PER_WRONG = 8
_BELIEVED_AFTER = 16
_CHECK_EVERY = 8
_STEP = 1 / 16


@dataclass(slots=True)
class _Record:
    right: int = 0
    wrong: int = 0
    believed: int = 0


class Hints:
    """The records of the lines of one model version."""

    def __init__(self) -> None:
        self.hinted = 0.0  # the share of failed runs whose hint was followed
        self.checked = 1.0  # the share of named requests that run alone
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def follows(self, line: str) -> bool:
        """Return whether the hint of a failed run is followed; ``line`` is empty without one."""
        record = self._records.get(line)
        follows = bool(line) and (record is None or record.right >= _RIGHT_PER_WRONG * record.wrong)
        self.hinted += _STEP * (follows - self.hinted)
        return follows

    def believes(self, line: str) -> bool:
        """Return whether the named request fails without a run alone, this time."""
        record = self._records.get(line)
        if record is None or record.wrong or record.right < _BELIEVED_AFTER:
            believes = False
        else:
            record.believed += 1
            believes = record.believed % _CHECK_EVERY != 0
        self.checked += _STEP * ((not believes) - self.checked)
        return believes

    def was_right(self, line: str) -> None:
        """Note that the named request failed alone, at the same line."""
        self._record(line).right += 1

    def was_wrong(self, line: str) -> None:
        """Note that the named request succeeded."""
        self._record(line).wrong += 1

    def _record(self, line: str) -> _Record:
        record = self._records.setdefault(line, _Record())
        self._records.move_to_end(line)
        if len(self._records) > _CAPACITY:
            self._records.popitem(last=False)
        return record
