"""Makes pages of the files and folders of the repository that pages of the site link.

The site thus shows files of its version and needs no address of a repository. Files and folders
that these pages link get pages, too. Of tests only names are listed: it would be a thousand pages.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from myst_parser.mdit_to_docutils.base import default_slugify
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.util.osutil import relative_uri

_ROOT = Path(__file__).parents[2]
_PAGES = "files"  # the folder of these pages on the site
_MAX_BYTES = 200_000
_NAMED_ONLY = _ROOT / "tests"
_LEFT_OUT = (".", "__pycache__")


class RepositoryFiles:
    """The linked files and folders, and their pages."""

    def __init__(self) -> None:
        self._linked: dict[Path, None] = {}

    def adopt_links(self, app: Sphinx, document: nodes.document) -> None:
        """Change links to files of the repository into links to their pages."""
        page = app.env.docname
        linked = (addnodes.pending_xref, addnodes.download_reference)
        for node in [node for kind in linked for node in document.findall(kind)]:
            target, _, anchor = _target(node).partition("#")
            path = (app.srcdir / page).parent.joinpath(target).resolve()
            if path.exists() and path.is_relative_to(_ROOT) and app.srcdir not in path.parents:
                address = f"{app.builder.get_relative_uri(page, self._page(path))}#{anchor}"
                link = nodes.reference("", "", *node.children, refuri=address.rstrip("#"))
                node.replace_self(link)

    def pages(self, app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield each page with its title and text, including those that pages link."""
        done: set[Path] = set()
        while waiting := self._linked.keys() - done:
            path = waiting.pop()
            done.add(path)
            title = str(path.relative_to(_ROOT))
            body = self._body(app, path)
            if path.suffix != ".md":  # Markdown has its own heading
                body = f"<h1>{escape(title)}</h1>\n{body}"
            yield self._page(path), {"title": title, "body": body}, "page.html"

    def _page(self, path: Path) -> str:
        self._linked[path] = None
        return f"{_PAGES}/{path.relative_to(_ROOT)}"

    def _body(self, app: Sphinx, path: Path) -> str:
        if path.is_dir():
            return "".join(self._list(app, path))
        if path.suffix == ".md":
            return self._rendered(app, path)
        content = path.read_bytes()
        if len(content) > _MAX_BYTES or b"\0" in content:
            return f"<p>{len(content)} bytes</p>"
        return _highlighted(app, content.decode(errors="replace"), _language(path.name))

    def _list(self, app: Sphinx, folder: Path) -> Iterator[str]:
        yield "<ul>\n"
        for path in sorted(folder.iterdir()):
            if not path.name.startswith(_LEFT_OUT):
                name = escape(path.name + "/" * path.is_dir())
                if path.is_file() or _NAMED_ONLY not in path.parents:
                    name = f'<a href="{self._address(app, folder, path)}">{name}</a>'
                yield f"<li>{name}</li>\n"
        yield "</ul>\n"

    def _rendered(self, app: Sphinx, path: Path) -> str:
        markdown = MarkdownIt("commonmark").enable("table")
        anchors_plugin(markdown, max_level=4, slug_func=default_slugify)
        tokens = markdown.parse(path.read_text(encoding="utf-8"))
        for token in [*tokens, *(inner for outer in tokens for inner in outer.children or ())]:
            if token.type == "code_inline":
                token.attrSet("class", "literal")
            elif token.type == "table_open":
                token.attrSet("class", "docutils")
            elif token.type == "fence":
                token.type = "html_block"
                token.content = _highlighted(app, token.content, token.info.partition(" ")[0])
            elif token.type == "image":  # one that a page of docs shows, too
                name = Path(str(token.attrGet("src"))).name
                token.attrSet("src", relative_uri(self._page(path), f"_images/{name}"))
            target, _, anchor = str(token.attrGet("href") or "").partition("#")
            linked = path.parent.joinpath(target).resolve()
            if target and linked.exists() and linked.is_relative_to(_ROOT):
                address = f"{self._address(app, path, linked)}#{anchor}"
                token.attrSet("href", address.rstrip("#"))
        return str(markdown.renderer.render(tokens, markdown.options, {}))

    def _address(self, app: Sphinx, source: Path, path: Path) -> str:
        page = app.env.path2doc(str(path))
        target = page if page in app.env.found_docs else self._page(path)
        return app.builder.get_relative_uri(self._page(source), target)


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    files = RepositoryFiles()
    # Before Sphinx itself looks for the files to download.
    app.connect("doctree-read", files.adopt_links, priority=100)
    app.connect("html-collect-pages", files.pages)
    return {"parallel_read_safe": False, "parallel_write_safe": False}


def _target(node: nodes.Element) -> str:
    """Return the target as written, with the suffix that Sphinx removes from documents."""
    target = str(node["reftarget"])
    if node.get("refdomain") == "doc":
        target += ".md"
    return f"{target}#{node.get('reftargetid') or ''}"


def _highlighted(app: Sphinx, text: str, language: str) -> str:
    assert isinstance(app.builder, StandaloneHTMLBuilder)  # the only builder that collects pages
    return app.builder.highlighter.highlight_block(text, language or "text")


def _language(file_name: str) -> str:
    try:
        return str(get_lexer_for_filename(file_name).aliases[0])
    except ClassNotFound:
        return "text"
