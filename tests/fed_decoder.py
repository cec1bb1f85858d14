"""A decoder that takes bytes instead of filling its buffer."""

from marserve.backend import framing
from marserve.backend.protocol import Buffer, Message


class Decoder(framing.Decoder):
    """Decodes bytes in pieces of any size."""

    def feed(self, data: Buffer) -> list[Message]:
        """Copy ``data`` in and return the messages that are complete."""
        messages = []
        remaining = memoryview(data)
        while remaining:
            free = self.buffer
            count = min(len(free), len(remaining))
            free[:count] = remaining[:count]
            remaining = remaining[count:]
            messages += self.received(count)
        return messages
