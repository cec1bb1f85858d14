"""The documentation site: it builds without a warning, and has all that it should.

A warning is, among others, a link that leads nowhere, and a page that the navigation lacks.
"""

import argparse
import inspect
import re
import subprocess
import sys
from functools import partial
from html import unescape
from pathlib import Path

import pytest

from marserve.frontend import cli, errors
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.model_schema import BY_KEY
from marserve.frontend.rest.api_description import describe_listener
from marserve.frontend.telemetry.metrics_config import load_metrics_config
from marserve.tools.doctor.comparison.answers import RULES as COMPARISON_RULES
from marserve.tools.doctor.rules import RULES

pytestmark = pytest.mark.site

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx")
    target = tmp_path_factory.mktemp("site")
    # As `make docs` does, and without what earlier builds left.
    options = ["--fresh-env", "--fail-on-warning", "--keep-going", "-d", target / "doctrees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, target / "html"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    return target / "html"


def pages() -> list[str]:
    sources = (path for path in DOCS.rglob("*.md") if "extensions" not in path.parts)
    return sorted(str(path.relative_to(DOCS).with_suffix("")) for path in sources)


def text_of(site: Path, page: str) -> str:
    html = (site / f"{page}.html").read_text(encoding="utf-8")
    body = html.partition('role="main"')[2].partition("<footer")[0]
    inline = r"</?(?:span|code|em|strong|a)\b[^>]*>"
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(inline, "", body)))


def test_every_page_is_there_with_a_title_and_leads_to_the_others(site):
    for page in pages():
        html = (site / f"{page}.html").read_text(encoding="utf-8")
        assert re.search(r"<title>[^<]*\w[^<]*</title>", html), page
    start = (site / "index.html").read_text(encoding="utf-8")
    navigation = start.partition('class="sidebar-tree"')[2].partition("</div>")[0]
    linked = {link.removesuffix(".html") for link in re.findall(r'href="([^"#]+)"', navigation)}
    assert set(pages()) - linked == {"index"}


def test_only_a_clone_says_how_to_get_the_generated_text(site):
    for source in sorted((DOCS / "reference").glob("*.md")):
        sentence, mark = "make docs writes", "<!-- generated"
        text = source.read_text(encoding="utf-8").replace("`", "")
        assert text.count(sentence) == text.count(mark), source.name
        assert sentence not in text_of(site, f"reference/{source.stem}"), source.name


def of_errors() -> set[str]:
    classes = [item for _, item in inspect.getmembers(errors, inspect.isclass)]
    return {item.wire_type for item in classes if issubclass(item, errors.ServeError)}


def of_metrics() -> set[str]:
    """Those in metrics.yaml, and all that the sources write down."""
    found = load_metrics_config()
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "frontend").rglob("*.py"))
    ours = (name for text in sources for name in re.findall(r'"(marserve_[a-z_]+)"', text))
    return {*found.ts, *found.model, *ours} - {"marserve_connection"}  # no metric


def of_endpoints() -> set[str]:
    document = describe_listener(["Inference", "Management", "Metrics"], open_inference=True)
    return {f"{method.upper()} {path}" for path, of in document["paths"].items() for method in of}


def of_commands() -> set[str]:
    visible = (each for each in cli.build_parser()._actions if each.help is not argparse.SUPPRESS)
    flags = (flag for action in visible for flag in action.option_strings)
    return {*flags, *(f"marserve {name}" for name in cli.PROGRAMS)}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("configuration", partial(set, KEYS)),
        ("model-settings", partial(set, BY_KEY)),
        ("errors", of_errors),
        ("metrics", of_metrics),
        ("endpoints", of_endpoints),
        ("command-line", of_commands),
        ("torchserve-names", lambda: {"GET /ping", "--foreground", "HandlerTime"}),
        ("doctor-rules", lambda: {*RULES, *COMPARISON_RULES}),
        ("environment", lambda: {"TS_INFERENCE_ADDRESS", "TS_TOKEN_EXPIRATION_TIME_MIN"}),
    ],
)
def test_the_reference_has_each_name(page, names, site):
    text, wanted = text_of(site, f"reference/{page}"), names()
    assert wanted
    assert {name for name in wanted if not re.search(rf"{re.escape(name)}(?!\w)", text)} == set()


def test_keys_and_settings_can_be_linked(site):
    html = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    anchors = {key.replace("_", "-") for key in KEYS}
    assert {anchor for anchor in anchors if f'id="{anchor}"' not in html} == set()


def test_files_of_the_repository_are_shown(site):
    html = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    assert 'href="../files/config.properties.html"' in html
    assert "max_request_size" in text_of(site, "files/config.properties")


def test_the_site_loads_nothing_from_elsewhere(site):
    start = (site / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|<link[^>]* href)="https?:[^"]*"', start) == []


def test_words_are_found(site):
    assert '"max_batch_delay"' in (site / "searchindex.js").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("[there](batching.md)", "batching"),
        ("[there](#nothing)", "nothing"),
        ("[there](../config.txt)", "config.txt"),
        ("[there](https:/nobody)", "web address"),
    ],
)
def test_a_link_that_leads_nowhere_fails_the_build(link, problem, tmp_path):
    pytest.importorskip("sphinx")
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "index.md").write_text(f"# One page\n\n{link}\n")
    extensions = DOCS / "extensions"
    (pages / "conf.py").write_text(
        f"import sys\nsys.path.insert(0, {str(extensions)!r})\n"
        'extensions = ["myst_parser", "repository_files", "link_check"]\nmyst_heading_anchors = 4\n'
    )
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "--fail-on-warning", pages, tmp_path / "html"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert problem in done.stderr
