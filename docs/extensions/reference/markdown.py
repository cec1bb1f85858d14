"""Functions that return Markdown."""

from collections.abc import Iterable, Sequence

from docutils.nodes import make_id


def code(text: str) -> str:
    """Return a text as code, and nothing for an empty text."""
    return f"`{text}`" if text else ""


def anchored(name: str) -> str:
    """Return a name as code with the anchor that `linked` uses."""
    return f"[`{name}`]{{#{make_id(name)}}}"


def linked(name: str, page: str) -> str:
    """Return a link to a name that is anchored on a page."""
    return f"[`{name}`]({page}#{make_id(name)})"


def cell(text: str) -> str:
    """Return a text for a cell of a table, without line breaks and bars."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table without the columns that are empty in all rows."""
    rows = [[cell(text) for text in row] for row in rows]
    used = [index for index in range(len(headings)) if any(row[index] for row in rows)]
    lines = [[headings[i] for i in used], ["---"] * len(used)]
    lines += [[row[i] for i in used] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def definition(term: str, *paragraphs: str) -> str:
    """Return an item of a list of definitions."""
    text = "\n\n  ".join(filter(None, paragraphs))
    return f"{term}\n: {text}\n"


def sentence(text: str) -> str:
    """Return a text with a capital at its start and a full stop at its end."""
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":", "?")) else ".")
