"""Follows the heads in bytes that aiohttp parses, for their deadlines."""

import httptools


class Heads:
    """Counts the heads of requests in the bytes of a connection.

    aiohttp does not report when a head begins, so its bytes are parsed a second time, which costs
    1 us a request.
    """

    __slots__ = ("_behind_upgrade", "_parser", "count", "is_in_head")

    def __init__(self) -> None:
        self.count = 0  # of complete heads
        self.is_in_head = False
        self._parser: httptools.HttpRequestParser | None = None
        #: Bytes behind the head of a request that asks for an upgrade; None without such a request.
        self._behind_upgrade: int | None = None

    @property
    def is_readable(self) -> bool:
        """Whether heads are still found: not behind garbage or an upgrade."""
        return self._parser is not None

    def start(self) -> None:
        """Parse the bytes that follow."""
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        """Parse bytes."""
        if self._parser is not None:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parser = None
                self._behind_upgrade = len(data) - upgrade.args[0]
            except httptools.HttpParserError:
                self._parser = None
        elif self._behind_upgrade is not None:
            self._behind_upgrade += len(data)

    def decline_upgrade(self, body_bytes: int) -> bool:
        """Continue after a request that asked for an upgrade, which is never accepted.

        Returns:
            Whether the connection may stay: not if more than the request has arrived. aiohttp loses
            that, and the client would read the next answer as the answer to what is lost.
        """
        if self._behind_upgrade is None:
            return True
        if self._behind_upgrade > body_bytes:
            return False
        self._behind_upgrade = None
        self.start()
        return True

    def on_message_begin(self) -> None:
        """Note that a head begins; called by the parser, as the method that follows."""
        self.is_in_head = True

    def on_headers_complete(self) -> None:
        """Count a head."""
        self.is_in_head = False
        self.count += 1
