"""The sequences of one stateful model version, and the request headers that name them."""

import asyncio
import time

from marserve.frontend.batching.sequences.sequence_table import SequenceTable
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import BadRequest
from marserve.frontend.settings.model_settings import ModelSettings
from marserve.frontend.telemetry.model_metrics import ModelMetrics

_MAX_ID_CHARACTERS = 256
_YES = "true"


class SequenceHeaders:
    """The names of the headers that contain the id and mark the first and last request."""

    def __init__(self, config: Config) -> None:
        self.id = config.ts_header_key_sequence_id
        self.start = config.ts_header_key_sequence_start
        self.end = config.ts_header_key_sequence_end
        self.all = (self.id, self.start, self.end)
        self._by_lower = {name.lower(): name for name in self.all}

    def read(self, headers: dict[str, str]) -> tuple[str, bool, bool]:
        """Remove id and marks from a request's headers, in any case; only a set end stays.

        Return the id, empty for none; whether the request begins a sequence; whether it ends it.

        Raises:
            BadRequest: The id is too long or not printable.
        """
        by_lower, found = self._by_lower, {}
        for key in [key for key in headers if key.lower() in by_lower]:
            found[by_lower[key.lower()]] = headers.pop(key).strip()
        sequence_id = found.get(self.id, "")
        if len(sequence_id) > _MAX_ID_CHARACTERS or not sequence_id.isprintable():
            raise BadRequest(
                f"{self.id}: the id of a sequence is a text of up to {_MAX_ID_CHARACTERS} "
                "printable characters."
            )
        ends = found.get(self.end, "").lower() == _YES
        if ends:
            headers[self.end] = _YES
        return sequence_id, found.get(self.start, "").lower() == _YES, ends

    def mark_start(self, headers: dict[str, str]) -> None:
        """Set the mark of the first request of a sequence."""
        headers[self.start] = _YES


class ModelSequences:
    """The table of sequences, with a timer of the event loop that calls `SequenceTable.expire`."""

    def __init__(
        self, settings: ModelSettings, names: SequenceHeaders, metrics: ModelMetrics
    ) -> None:
        self.names = names
        self.is_continuous = settings.continuous_batching
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.table = SequenceTable(
            settings.sequence_limits, time.monotonic, self._wake_at, metrics.sequence_ended
        )

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake_at(self, moment: float) -> None:
        self.close()
        self._timer = self._loop.call_later(moment - time.monotonic(), self.table.expire)
