"""Cuts the output of a program into lines."""

# The longest line; a progress bar may print without newlines.
MAX_LINE_BYTES = 64 * 1024


class LineCutter:
    """Returns the lines of bytes that arrive in parts; longer ones are cut."""

    def __init__(self) -> None:
        self._partial = b""

    def cut(self, data: bytes, *, is_last: bool = False) -> list[str]:
        """Return the lines that are complete with ``data``; if it is the last, all."""
        complete, newline, self._partial = (self._partial + data).rpartition(b"\n")
        if self._partial and (is_last or len(self._partial) > MAX_LINE_BYTES):
            complete += newline + self._partial
            newline, self._partial = b"\n", b""
        if not newline:
            return []
        text = complete.decode(errors="backslashreplace")
        lines = text.split("\n")
        return [line.rstrip("\r") for line in lines] if "\r" in text else lines
