"""Follows the heads in bytes that aiohttp parses, for their deadlines and what is odd in them."""

import httptools


class Heads:
    """Counts the heads of requests in the bytes of a connection.

    aiohttp does not report when a head begins, so its bytes are parsed a second time, which costs
    1 us a request.
    """

    __slots__ = (
        "_behind_upgrade",
        "_had_upgrade",
        "_is_between",
        "_parser",
        "count",
        "error",
        "held",
        "is_in_head",
        "last",
        "last_index",
    )

    def __init__(self) -> None:
        self.count = 0  # of complete heads
        self.is_in_head = False
        self.held = b""  # an incomplete head, which aiohttp does not have yet
        self.last = b""  # the last head that began a piece of the bytes
        self.last_index = -1  # the number of heads before it
        self.error = ""  # why the bytes are no request; empty while they are
        self._is_between = True
        self._had_upgrade = False
        self._parser: httptools.HttpRequestParser | None = None
        #: Bytes behind the head of a request that asks for an upgrade; None without such a request.
        self._behind_upgrade: int | None = None

    def forget(self) -> None:
        """Release the bytes of heads."""
        self.held = self.last = b""

    @property
    def is_readable(self) -> bool:
        """Whether heads are still found: not behind garbage or an upgrade."""
        return self._parser is not None

    @property
    def is_between(self) -> bool:
        """Whether the next byte begins a request. Uncertain, and False, behind an upgrade."""
        return self._is_between and self._parser is not None

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
                self._had_upgrade, self._is_between = True, False
            except httptools.HttpParserError as error:
                self._parser = None
                self.error = str(error)
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
        """Note that a head begins; called by the parser, as the methods that follow."""
        self.is_in_head = True
        self._is_between = False

    def on_headers_complete(self) -> None:
        """Count a head."""
        self.is_in_head = False
        self.count += 1

    def on_message_complete(self) -> None:
        """Note that a request is complete."""
        self._is_between = not self._had_upgrade
