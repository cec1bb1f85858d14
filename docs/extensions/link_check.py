"""Checks the links of the built site: targets and anchors exist, addresses are valid."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


@dataclass
class _Page(HTMLParser):
    """The links of a page, and its anchors."""

    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser."""
        found = {name: value for name, value in attrs if value}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        wanted = "href" if tag in ("a", "link") else "src"
        if wanted in found:
            self.links.append(found[wanted])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _check(app: Sphinx, exception: Exception | None) -> None:
    if exception is None and app.builder.format == "html":
        for page, link, problem in broken_links(Path(app.outdir)):
            logger.warning("%s: link to %s: %s", page, link, problem)


def broken_links(site: Path) -> list[tuple[str, str, str]]:
    """Return page, link and problem of each broken link of a built site."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    return [
        (str(path.relative_to(site)), link, problem)
        for path, page in pages.items()
        for link in dict.fromkeys(page.links)
        if (problem := _problem(path, link, pages))
    ]


def _read(path: Path) -> _Page:
    page = _Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _problem(path: Path, link: str, pages: dict[Path, _Page]) -> str:
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto"):
        return ""
    if parts.scheme or parts.netloc:
        is_well_formed = parts.scheme in ("http", "https") and "." in parts.netloc
        return "" if is_well_formed and " " not in link else "not a web address"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return "the file does not exist"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return "the anchor does not exist"
    return ""
