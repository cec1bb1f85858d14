"""Pieces of Markdown."""

from collections.abc import Iterable, Sequence

from docutils.nodes import make_id


def code(text: str) -> str:
    """As code, or nothing for nothing."""
    return f"`{text}`" if text else ""


def anchored(name: str) -> str:
    """A name as code, which `linked` leads to."""
    return f"[`{name}`]{{#{make_id(name)}}}"


def linked(name: str, page: str) -> str:
    """A name that is anchored on a page."""
    return f"[`{name}`]({page}#{make_id(name)})"


def cell(text: str) -> str:
    """A text that ends neither the cell nor the row of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, without the columns that are empty in all rows."""
    rows = [[cell(text) for text in row] for row in rows]
    used = [index for index in range(len(headings)) if any(row[index] for row in rows)]
    lines = [[headings[i] for i in used], ["---"] * len(used)]
    lines += [[row[i] for i in used] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def definition(term: str, *paragraphs: str) -> str:
    """An item of a list of definitions."""
    text = "\n\n  ".join(filter(None, paragraphs))
    return f"{term}\n: {text}\n"


def sentence(text: str) -> str:
    """It begins with a capital and ends with a full stop."""
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":", "?")) else ".")
