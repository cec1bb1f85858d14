"""Configuration of the documentation site for Sphinx; `make docs` builds it.

The pages are also read on GitHub, so links to pages and files of the repository are relative.
`extensions/reference` generates text from the code, `extensions/repository_files.py` makes pages
of linked files.
"""

import sys
from pathlib import Path

from marserve.frontend.version import __version__

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "marserve"
author = "the authors of marserve"
copyright = author  # noqa: A001 - Sphinx's name
version = release = __version__

extensions = ["myst_parser", "reference", "repository_files", "link_check"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["extensions"]
nitpicky = True
highlight_language = "text"  # of code blocks without a language
smartquotes = False  # --flags stay as they are

myst_enable_extensions = ["attrs_inline", "deflist"]
myst_heading_anchors = 4  # levels of headings, as on GitHub

html_theme = "furo"
html_title = "marserve"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
