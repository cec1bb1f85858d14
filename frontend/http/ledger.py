"""What all answers of a listener have in common: some header lines, and that they are noted."""

from dataclasses import dataclass

from marserve.frontend.http.access_log import AccessLog
from marserve.frontend.telemetry.metrics import Metrics


@dataclass(frozen=True)
class Ledger:
    """Notes the answers of a listener.

    Attributes:
        prelude: Header lines of every answer.
        access_log: Where answers are noted.
        metrics: Where they are counted.
    """

    prelude: str
    access_log: AccessLog
    metrics: Metrics

    def note(self, peer: str, method: str, target: str, status: int, seconds: float) -> None:
        """An answer is about to be sent: to whom, for what, how it ended, how long it took."""
        self.metrics.count_response(status)
        self.access_log.add(peer, method, target, status, seconds)
