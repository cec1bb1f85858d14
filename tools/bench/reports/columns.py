"""Tables of aligned cells for a terminal."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], *, prose: int = 0) -> str:
    """Return lines of cells as text in columns.

    Args:
        lines: Lines with equal numbers of cells.
        prose: Number of last columns with sentences, aligned left; all others are aligned right.
    """
    columns = list(zip(*lines, strict=True))
    first_prose = len(columns) - prose
    padded = [_padded(column, is_prose=at >= first_prose) for at, column in enumerate(columns)]
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*padded, strict=True))


def _padded(column: Sequence[str], *, is_prose: bool) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) if is_prose else cell.rjust(width) for cell in column]
