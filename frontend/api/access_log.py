"""One line per answer, written by the handful: formatting and writing leave the hot path.

The lines wait for a moment in memory and go to the logger ``ACCESS_LOG`` as one record, which its
formatter passes on as it is. The timer runs only while there is something to write.
"""

import asyncio
import json
import logging
import time

from marserve.frontend.logs.setup import timestamp

logger = logging.getLogger("ACCESS_LOG")

_FLUSH_SECONDS = 0.5
# Few, because the loop stands still while they are formatted.
_FLUSH_LINES = 256
# When, who, method, target, status, seconds.
_Entry = tuple[float, str, str, str, int, float]


class AccessLog:
    """Collects what is to be logged.

    Args:
        loop: Rings when it is time to write.
        as_json: Whether each line is a JSON object.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, as_json: bool = False) -> None:
        self._loop = loop
        self._line = _json_line if as_json else _line
        self._entries: list[_Entry] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, peer: str, method: str, target: str, status: int, seconds: float) -> None:
        """Note an answer: who asked for what, how it ended, how long it took."""
        self._entries.append((time.time(), peer, method, target, status, seconds))
        if self._timer is None:
            self._timer = self._loop.call_later(_FLUSH_SECONDS, self.flush)
        elif len(self._entries) >= _FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Write what has been collected."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        entries, self._entries = self._entries, []
        if entries and logger.isEnabledFor(logging.INFO):
            logger.info("\n".join(map(self._line, entries)))


def _json_line(entry: _Entry) -> str:
    at, peer, method, target, status, seconds = entry
    members = {
        "time": timestamp(at),
        "peer": peer,
        "method": method,
        "path": target,
        "status": status,
        "milliseconds": round(seconds * 1000),
    }
    return json.dumps(members)


def _line(entry: _Entry) -> str:
    at, peer, method, target, status, seconds = entry
    # A request line cannot hold a line break, but a control character would still deface the log.
    shown = target if target.isprintable() else ascii(target)[1:-1]
    milliseconds = round(seconds * 1000)
    return f'{timestamp(at)} - /{peer} "{method} {shown} HTTP/1.1" {status} {milliseconds}'
