"""A wrong value, as people are told about it: in few words, however large it is."""

import reprlib
from collections.abc import Callable

_MOST_BITS = 128


class _Short(reprlib.Repr):
    """The aliases of a yaml can nest a line of gigabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2

    def repr_int(self, x: int, level: int) -> str:
        """Python refuses to write thousands of digits, which hexadecimal ones get past yaml."""
        if x.bit_length() > _MOST_BITS:
            return f"<a number of {x.bit_length()} bits>"
        return super().repr_int(x, level)


#: A value in few words.
shown: Callable[[object], str] = _Short().repr
