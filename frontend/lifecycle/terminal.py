"""Prints text of clients or files without letting it control the terminal."""

import re
import sys
from typing import TextIO

_SUSPECT = re.compile(r"\r(?!\n)|[^\n\r\t -~]")


def print_text(text: str, file: TextIO | None = None) -> None:
    """Print text to ``file`` (stdout by default), with escapes for control characters.

    Bidirectional overrides and characters that the encoding of ``file`` lacks are escaped, too.
    Line breaks and tabs remain. JSON keeps its value.
    """
    out = sys.stdout if file is None else file
    encoding = out.encoding or "utf-8"
    shown = _SUSPECT.sub(_escaped, text).encode(encoding, "backslashreplace").decode(encoding)
    print(shown, file=out, flush=True)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0].isprintable() else f"\\u{ord(match[0]):04x}"
