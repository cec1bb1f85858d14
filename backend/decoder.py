"""Bytes to messages, in whatever pieces they come; no I/O, no clock.

Both sides use it in shells of their own: the worker reads into `Decoder.buffer` from a blocking
socket, the frontend through `asyncio.BufferedProtocol`. Either way a body is copied once, out of
the receive buffer.
"""

from marserve.backend.framing import AFTER_LENGTH_BYTES, LENGTH_BYTES, decode
from marserve.backend.protocol import Buffer, Message, ProtocolError

_SCRATCH_BYTES = 64 * 1024


class Decoder:
    """Bytes in, messages out, in whatever pieces they come.

    The caller fills `buffer` from its front and says how much with `received`. A frame longer than
    the scratch buffer gets one of its own size, so that a large body is received in place.

    Args:
        max_frame_bytes: Longest frame the peer may send; may be raised later.
    """

    def __init__(self, max_frame_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._store = bytearray(_SCRATCH_BYTES)
        self._filled = 0

    @property
    def is_between_frames(self) -> bool:
        """Whether the peer may leave now without cutting a message short."""
        return not self._filled

    @property
    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty."""
        return memoryview(self._store)[self._filled :]

    def received(self, count: int) -> list[Message]:
        """Take note of ``count`` new bytes in `buffer`; return the messages that are complete.

        Raises:
            ProtocolError: The bytes are no frame, or one longer than allowed.
        """
        self._filled += count
        if len(self._store) > _SCRATCH_BYTES:
            return self._received_large()
        messages = []
        start = 0
        view = memoryview(self._store)
        while (end := self._end_of_frame(view, start)) is not None and end <= self._filled:
            messages.append(decode(view[start + LENGTH_BYTES : end]))
            start = end
        self._keep_from(start)
        return messages

    def _received_large(self) -> list[Message]:
        """The one message that has a buffer of its own, if it is complete."""
        store = self._store
        if self._filled < len(store):
            return []
        self._store = bytearray(_SCRATCH_BYTES)
        self._filled = 0
        return [decode(memoryview(store)[LENGTH_BYTES:], store)]

    def feed(self, data: Buffer) -> list[Message]:
        """Copy ``data`` in and return the messages that are complete.

        Raises:
            ProtocolError: As `received`.
        """
        messages = []
        remaining = memoryview(data)
        while remaining:
            room = self.buffer
            count = min(len(room), len(remaining))
            room[:count] = remaining[:count]
            remaining = remaining[count:]
            messages += self.received(count)
        return messages

    def _end_of_frame(self, view: memoryview, start: int) -> int | None:
        """Where the frame that begins at ``start`` ends; None while its length is not there yet."""
        if self._filled - start < LENGTH_BYTES:
            return None
        length = int.from_bytes(view[start : start + LENGTH_BYTES], "big")
        if not AFTER_LENGTH_BYTES <= length <= self.max_frame_bytes:
            raise ProtocolError(
                f"a frame of {length} bytes, "
                f"allowed are {AFTER_LENGTH_BYTES} to {self.max_frame_bytes}"
            )
        return start + LENGTH_BYTES + length

    def _keep_from(self, start: int) -> None:
        """Move what is left of an incomplete frame to the front of a buffer that can hold it."""
        left = self._filled - start
        if not left:  # what nearly always happens: the peer waits for our answer
            self._filled = 0
            return
        needed = _SCRATCH_BYTES
        if left >= LENGTH_BYTES:
            length = int.from_bytes(self._store[start : start + LENGTH_BYTES], "big")
            needed = max(needed, LENGTH_BYTES + length)
        if start == 0 and needed == _SCRATCH_BYTES:
            return
        store = self._store if needed == _SCRATCH_BYTES else bytearray(needed)
        store[:left] = self._store[start : self._filled]
        self._store = store
        self._filled = left
