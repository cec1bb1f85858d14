"""The number of gRPC calls that may be open, and of messages that are read at a time.

Both follow from the memory that requests may use (``max_bytes_in_flight``, here M). In the worst
case, incomplete first messages use M/2, later messages of streams M/2, those of calls that need no
key M/8, calls that are not read M with and M without a key, and complete messages M.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from marserve.frontend.grpc.message_reads import MessageReads
from marserve.frontend.security.usage import Usage

#: What grpc keeps of a call that is not read, in bytes.
WINDOW_BYTES = 1 << 16
# Seconds after which a read may end because other calls need its slot.
_UNDISTURBED_SECONDS = 5.0
# Streams that may be open even if their messages of full length would not fit.
_MIN_STREAMS = 16
# Limits of calls that need no key.
_PROBE_BYTES = 1 << 16
_PROBE_SECONDS = 5.0
_PROBE_UNDISTURBED_SECONDS = 0.02


@dataclass
class CallKind:
    """Calls that share limits."""

    max_open: int  # at the same time
    limit: str  # the name of the key that limits it
    reads: MessageReads  # of the first message of each
    open: int = 0

    def remove(self, _task: object) -> None:
        """Count one call less."""
        self.open -= 1


@dataclass(frozen=True)
class Limits:
    """What the clients of a listener may use."""

    max_calls: int  # open at the same time with a key; the same number without one
    usage: Usage  # bytes of requests
    max_message: int  # bytes
    message_timeout: float  # seconds for the message of a call, or the first of a stream
    on_limit: Callable[[str], object] = lambda _limit: None  # called with the name of a limit

    def kinds(self) -> tuple[CallKind, CallKind, CallKind]:
        """Return the kinds of calls: without a key, with one request, with a stream of requests.

        A stream may wait for its next request for any time, so each counts as one message.
        """
        slots = self._that_fit(1 / 2)
        probes = MessageReads(
            self._that_fit(1 / 8), _PROBE_BYTES, _PROBE_UNDISTURBED_SECONDS, _PROBE_SECONDS
        )
        reads = MessageReads(slots, self.max_message, _UNDISTURBED_SECONDS, self.message_timeout)
        max_streams = max(_MIN_STREAMS, slots)
        return self._kind(probes), self._kind(reads), self._kind(reads, max_streams)

    def _kind(self, reads: MessageReads, max_open: int = sys.maxsize) -> CallKind:
        that_fit = min(max_open, max(1, self.usage.max_bytes // WINDOW_BYTES))
        if that_fit < self.max_calls:
            return CallKind(that_fit, "max_bytes_in_flight", reads)
        return CallKind(self.max_calls, "grpc_max_calls", reads)

    def _that_fit(self, share: float) -> int:
        """Return the number of messages that fit into a share of the bytes in flight."""
        return max(1, int(self.usage.max_bytes * share) // self.max_message)
