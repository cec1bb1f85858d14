"""The comparison with TorchServe as data: each name a user can write, with its verdict and note.

docs/compatibility.md contains the differences; it is linked here and copied into the package.
names.md contains identical and new names. Their sections have the same headings, with lists and
tables::

    - Same: `a`, `b` (a remark), `c.{d,e}`, `GET /f[/{g}]`
    - New, GROUP: `h`

    | Better | How |
    |---|---|
    | `i`, `j` | how |
    | GROUP: `k` | how |

The first heading of a table is the verdict of its rows. Braces with a comma expand to each of their
words, brackets mark an optional part, and a star in an unsupported name matches any characters.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path

#: Path of the page in the repository.
PAGE = "docs/compatibility.md"
_LISTS = {"Same": "same", "New": "new", "No effect": "refused", "Later": "later"}
_TABLES = {"Better": "better", "Refused": "refused", "Later": "later"}
_CELLS = 2
_FILES = tuple(map(Path(__file__).with_name, ("compatibility.md", "names.md")))


@dataclass(frozen=True)
class Entry:
    """A list or a row of a table: section, group, names, verdict and note."""

    section: str
    group: str
    text: str
    verdict: str
    note: str
    is_list: bool = False

    @cached_property
    def names(self) -> list[str]:
        """The names in the entry, expanded."""
        found = re.findall(r"`([^`]+)`", self.text)
        return [name for pattern in found for name in spelled_out(pattern)]


def spelled_out(pattern: str) -> list[str]:
    """Return all names that a pattern expands to."""
    if choice := re.search(r"\{([^{}]*,[^{}]*)\}", pattern):
        words = choice[1].split(",")
    elif choice := re.search(r"\[(/[^\[\]]*)\]", pattern):
        words = ["", choice[1]]
    else:
        return [pattern]
    ends = pattern[: choice.start()], pattern[choice.end() :]
    found = (name for word in words for name in spelled_out(word.join(ends)))
    return list(dict.fromkeys(found))


def read_entries(text: str) -> Iterator[Entry]:
    """Return the entries of a page in order; raise ValueError for a malformed line."""
    section = verdict = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        elif line.startswith("- "):
            found = re.match(r"- (\w[\w ]+?)(?:, ([^:`]+))?: (.+)", line)
            if not found:
                raise ValueError(line)
            names = re.sub(r"\(.*?\)", "", found[3])
            yield Entry(section, found[2] or "", names, _LISTS[found[1]], found[3], is_list=True)
        elif line.startswith("| "):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != _CELLS:
                raise ValueError(line)
            if cells[0] in _TABLES:
                verdict = _TABLES[cells[0]]
                continue
            grouped = re.match(r"([^`:]+): (.*)", cells[0])
            group, names = grouped.groups() if grouped else ("", cells[0])
            yield Entry(section, group, names, verdict, cells[1])


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """Return the entries of the page and of the names."""
    texts = (file.read_text(encoding="utf-8") for file in _FILES)
    return tuple(entry for text in texts for entry in read_entries(text))


def find(section: str, name: str) -> Entry | None:
    """Return the entry of a name in a section, or None."""
    rows = [entry for entry in entries() if entry.section == section]
    # Tables are more specific than lists.
    for entry in sorted(rows, key=lambda entry: entry.is_list):
        if any(name == item or ("*" in item and fnmatchcase(name, item)) for item in entry.names):
            return entry
    return None


def link(section: str) -> str:
    """Return the link to a section of the page."""
    anchor = re.sub(r"[^\w\- ]", "", section.lower()).replace(" ", "-")
    return f"{PAGE}#{anchor}"


def reason(entry: Entry) -> str:
    """Return the note of an entry without the markup of links and code."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", entry.note)
    return plain.replace("`", "")
