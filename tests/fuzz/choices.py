"""Bytes as a source of choices, for targets whose inputs have a shape that bytes seldom have."""

from collections.abc import Callable, Sequence
from typing import Any


class Choices:
    """Makes values of bytes; when they are used up, the smallest ones."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def is_empty(self) -> bool:
        """Whether all bytes are used up."""
        return self._at >= len(self._data)

    def byte(self) -> int:
        """The next byte."""
        self._at += 1
        return self._data[self._at - 1] if self._at <= len(self._data) else 0

    def number(self, below: int) -> int:
        """A number from 0 on."""
        value = 0
        scale = 1
        while scale < below:
            value, scale = value << 8 | self.byte(), scale << 8
        return value % below

    def flag(self) -> bool:
        """True or false."""
        return bool(self.byte() & 1)

    def integer(self) -> int:
        """A number of either sign, small ones more often."""
        size = (1, 1, 1, 2, 4, 8, 9)[self.number(7)]
        return int.from_bytes(self.take(size), "big", signed=True)

    def take(self, count: int) -> bytes:
        """As many of the next bytes as there are, up to ``count``."""
        found = self._data[self._at : self._at + count]
        self._at += count
        return found

    def some_bytes(self, most: int = 64) -> bytes:
        """A few bytes."""
        return self.take(self.number(most))

    def text(self, most: int = 16) -> str:
        """A text, mostly ASCII, perhaps with any other character but surrogates."""
        if self.byte() % 4:
            return self.some_bytes(most).decode("latin-1")
        points = (self.number(0x110000) for _ in range(self.number(4)))
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    def one_of(self, values: Sequence[Any]) -> Any:
        """One of several values."""
        return values[self.number(len(values))]

    def several(self, make: Callable[[], Any], most: int = 4) -> list[Any]:
        """Up to ``most`` values, less than 1 per remaining byte."""
        made = []
        for _ in range(self.number(most + 1)):
            if self.is_empty:
                break
            made.append(make())
        return made
