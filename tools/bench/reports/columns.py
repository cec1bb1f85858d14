"""Cells in columns, for a terminal."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], *, prose: int = 0) -> str:
    """Lines of cells as text.

    Args:
        lines: As many cells in each.
        prose: How many of the last columns are sentences. They begin at the left; all others end at
            the right, where numbers are compared.
    """
    columns = list(zip(*lines, strict=True))
    first_prose = len(columns) - prose
    padded = [_padded(column, is_prose=at >= first_prose) for at, column in enumerate(columns)]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def _padded(column: Sequence[str], *, is_prose: bool) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) if is_prose else cell.rjust(width) for cell in column]
