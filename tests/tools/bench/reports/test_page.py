"""The page as a browser reads it: by its tags, not by its bytes."""

import re
import sys
from functools import cache
from html.parser import HTMLParser

import pytest
from measurements import REFUSED, run, session, sweep

from marserve.tools.bench.measurement import Point
from marserve.tools.bench.recommendation import Choice, Goal, Recommendation, Trial
from marserve.tools.bench.reports.page import as_html
from marserve.tools.bench.reports.summary import summarise
from marserve.tools.bench.reports.table import Columns

HOSTILE = "</title><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
VOID = {"meta", "br", "hr", "img", "link", "input"}
GOAL = Goal(percent=99, latency_ms=50)
FULL = run(Point(clients=2, workers=1, batch_size=1), timeline=[1, 2])
OPEN = run(Point(rate=1.6, workers=1, batch_size=1), timeline=[1, 2])
FOUND = Recommendation(GOAL, Choice(FULL, OPEN), (Trial(REFUSED, HOSTILE, True),))
RECOMMENDATIONS = {"none": None, "found": FOUND, "unmet": Recommendation(GOAL, None, ())}


class Page(HTMLParser):
    """What is on a page; refuses tags that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self._open:
            self.texts.setdefault(tag, []).append(data)

    def text(self, tag: str) -> str:
        return "".join(self.texts.get(tag, []))

    def values(self, attribute: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == attribute]


SESSIONS = {
    "nothing": session(),
    "one": session(run(first_inference_ms=812, timeline=[2, 2])),
    "sweep": sweep(repeat=3),
    "failed": session(REFUSED, run(latencies_ms=[])),
    "hostile": session(run(errors={HOSTILE: 1}), model=HOSTILE, allowed=1),
    "many": session(*(run(Point(clients=count), timeline=[2]) for count in range(1, 15))),
}


@cache
def page_text(name: str, recommendation: str = "none") -> str:
    """Drawn once: pictures take a tenth of a second each."""
    return as_html(SESSIONS[name], RECOMMENDATIONS[recommendation])


@pytest.mark.parametrize(
    ("name", "recommendation"),
    [*((name, "none") for name in SESSIONS), ("one", "unmet"), ("hostile", "found")],
)
def test_the_page_stands_alone_and_runs_nothing(name, recommendation):
    text = page_text(name, recommendation)
    page = Page(text)
    assert not {"script", "img", "link", "iframe", "object", "base", "form"} & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    links = [*page.values("href"), *page.values("xlink:href"), *page.values("src")]
    assert all(link.startswith("#") for link in links)
    assert re.findall(r"@import|url\((?!#)", text) == []


@pytest.mark.parametrize("name", ["nothing", "sweep", "many", "failed"])
def test_every_id_is_the_only_one_and_every_reference_has_its_aim(name):
    text = page_text(name)
    page = Page(text)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    aims = [value.removeprefix("#") for value in page.values("xlink:href")]
    aims += [*re.findall(r"url\(#([^)]+)\)", text), *page.values("aria-labelledby")]
    assert set(aims) <= set(ids)


def test_what_comes_from_outside_stays_text():
    page = Page(page_text("hostile", "found"))
    assert HOSTILE in page.text("h1")
    assert HOSTILE in page.text("title")
    assert HOSTILE in page.text("li")
    assert HOSTILE in page.text("td")
    assert HOSTILE in page.text("pre")


@pytest.mark.parametrize("name", ["one", "sweep", "failed"])
def test_the_page_has_every_number_that_the_terminal_shows(name):
    summaries = summarise(SESSIONS[name])
    columns = Columns.of(summaries)
    page = Page(page_text(name))
    text = page.text("td")
    for cell in [
        *columns.headings,
        *(cell for summary in summaries for cell in columns.cells(summary)),
    ]:
        assert cell in text + page.text("th")


def test_the_page_is_readable_without_seeing_it():
    page = Page(page_text("sweep", "found"))
    assert ("html", "lang", "en") in page.attributes
    assert page.tags.count("h1") == 1
    assert page.tags.count("table") == page.tags.count("caption") + 1  # facts have a heading each
    pictures = page.tags.count("svg")
    assert pictures == page.tags.count("figcaption") == page.values("role").count("img") > 0
    assert {value for tag, name, value in page.attributes if (tag, name) == ("th", "scope")} == {
        "col",
        "row",
    }


def test_a_sweep_is_drawn_as_curve_distribution_and_timeline():
    page = Page(page_text("sweep"))
    assert re.findall(r"[A-Z][a-z ]+", page.text("figcaption"))
    assert page.text("h3").startswith("Throughput and latency")
    for title in ("Latency by percentile", "Throughput over time"):
        assert title in page.text("h3")


def test_more_lines_than_can_be_told_apart_get_a_picture_more():
    page = Page(page_text("many"))
    assert "Latency by percentile (3 of 3)" in page.text("h3")


def test_points_that_failed_are_not_drawn_and_that_is_said():
    page = Page(as_html(session(run(Point(clients=1)), run(Point(clients=2)), REFUSED)))
    assert "Points that FAILED are left out: 1." in page.text("figcaption")
    assert "500" not in page.text("svg")
    assert "FAILED" in page.text("td")


def test_where_all_failed_there_is_nothing_to_draw():
    page = Page(page_text("failed"))
    assert "svg" not in page.tags
    assert "No run succeeded: there is nothing to draw." in page.text("p")


def test_without_matplotlib_the_page_says_what_is_missing_and_has_the_tables(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "marserve.tools.bench.reports.plots", raising=False)
    page = Page(as_html(SESSIONS["sweep"]))
    assert "pip install matplotlib" in page.text("p")
    assert "svg" not in page.tags
    assert page.text("td")


def test_pictures_take_their_colours_from_the_page():
    text = page_text("sweep")
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", pictures)) == set()
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", text))
    defined = re.findall(r"(--[a-z0-9-]+):", text)
    assert used <= set(defined)
    assert all(defined.count(name) == 2 for name in used)  # light and dark


def test_a_recommendation_is_told_with_the_lines_to_paste():
    page = Page(page_text("one", "found"))
    assert "Recommended for p99 within 50 ms" in page.text("p")
    assert "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 1" in page.text("code")


def test_that_nothing_meets_the_goal_is_told():
    page = Page(page_text("one", "unmet"))
    assert "Nothing that was tried meets the goal" in page.text("p")
    assert "unmet" in " ".join(page.values("class"))
