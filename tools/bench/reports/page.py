"""The report as one self-contained HTML page, without scripts, fonts or pictures to load.

All external text (the model's name, error messages, the command) is escaped where it is inserted.
Colours are CSS variables, so pictures and text follow the reader's light or dark mode.
"""

from collections.abc import Iterable, Sequence
from html import escape

from marserve.tools.bench.measurement import Measurement, Session
from marserve.tools.bench.recommendation import Recommendation
from marserve.tools.bench.reports.pictures import Picture, pictures
from marserve.tools.bench.reports.style import STYLE
from marserve.tools.bench.reports.summary import (
    NOTHING,
    Summary,
    format_point,
    number,
    plain,
    summarise,
)
from marserve.tools.bench.reports.table import Columns, format_errors, notes, shared_settings


def as_html(session: Session, recommendation: Recommendation | None = None) -> str:
    """Return the HTML page of a session."""
    summaries = summarise(session)
    title = f"{plain(session.target.model)} on {plain(session.target.server)}"
    parts = [
        _header(session, summaries, title),
        _recommended(recommendation, plain(session.target.model)) if recommendation else "",
        _results(summaries),
        _pictures(summaries, recommendation),
        _runs(summaries),
        _environment(session),
    ]
    return _DOCUMENT.format(title=escape(title), style=STYLE, body="\n".join(filter(None, parts)))


_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}: marserve bench</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _header(session: Session, summaries: Sequence[Summary], title: str) -> str:
    shared = shared_settings(summaries)
    facts = [f"at {plain(session.target.url)}", shared, plain(session.began)]
    return (
        f"<header>\n<h1>{escape(title)}</h1>\n"
        f"<p>{escape(' · '.join(filter(None, facts)))}</p>\n</header>"
    )


# -- results ---------------------------------------------------------------------------------------


def _results(summaries: Sequence[Summary]) -> str:
    if not summaries:
        return _section("Results", "<p>Nothing was measured.</p>")
    columns = Columns.of(summaries)
    rows = [(columns.cells(summary), summary.has_failed) for summary in summaries]
    body = _table("Results of each point", columns.headings, rows)
    return _section("Results", body + _notes(summaries) + _errors(summaries))


def _notes(summaries: Sequence[Summary]) -> str:
    latencies = "Latencies in milliseconds, from the moment a request was due to its whole answer."
    return "".join(f'<p class="note">{escape(item)}</p>' for item in [latencies, *notes(summaries)])


def _errors(summaries: Sequence[Summary]) -> str:
    errors = format_errors(summaries)
    return f"<h3>Errors</h3>{_list(errors)}" if errors else ""


def _pictures(summaries: Sequence[Summary], recommendation: Recommendation | None) -> str:
    if not summaries:
        return ""
    try:
        body = "\n".join(map(_figure, pictures(summaries, recommendation)))
    except ImportError as error:
        body = f"<p>{escape(f'Plots require matplotlib: pip install matplotlib ({error}).')}</p>"
    return _section("Plots", body or "<p>No run succeeded: there is nothing to draw.</p>")


def _figure(picture: Picture) -> str:
    return (
        f"<figure>\n<h3>{escape(picture.title)}</h3>\n"
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(picture.title)}">'
        f"{picture.svg}</div>\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
    )


def _runs(summaries: Sequence[Summary]) -> str:
    headings = ["point", "run", "seconds", "answers", "errors"]
    figures = Columns.of(summaries).figures
    rows = []
    for summary in summaries:
        for count, (run, failure) in enumerate(_runs_of(summary), start=1):
            values = [None if failure else figure.of(run) for figure in figures]
            cells = [
                format_point(summary.point) or NOTHING,
                str(count),
                number(run.seconds),
                str(run.answers),
                str(run.failed),
                *(NOTHING if value is None else number(value) for value in values),
            ]
            rows.append((cells, bool(failure)))
    table = _table(
        "Each run by itself", [*headings, *(figure.heading for figure in figures)], rows, "points"
    )
    return f"<details><summary>Every run</summary>{table}</details>" if rows else ""


def _runs_of(summary: Summary) -> Iterable[tuple[Measurement, str]]:
    return zip(summary.runs, summary.failures, strict=True)


# -- recommendation and environment ----------------------------------------------------------------


def _recommended(recommendation: Recommendation, model: str) -> str:
    kind = "met" if recommendation.choice else "unmet"
    lines = "".join(f"<p>{escape(line)}</p>" for line in recommendation.verdict().splitlines())
    parts = [f'<div class="verdict {kind}">{lines}</div>']
    if recommendation.choice:
        parts.append("<h3>To paste into model-config.yaml</h3>")
        parts.append(_code("\n".join(recommendation.yaml_lines())))
        parts.append("<h3>Or when registering, or in config.properties</h3>")
        parts.append(_code(recommendation.register_call(model)))
        parts.append(_code(recommendation.properties_line(model)))
    columns, *rejected = recommendation.rejected_cells()
    if rejected:
        others = _table("What was rejected", columns, [(item, False) for item in rejected], "prose")
        parts.append(f"<details><summary>What was rejected, and why</summary>{others}</details>")
    return _section("Recommendation", "\n".join(parts))


def _environment(session: Session) -> str:
    facts = {
        "server": session.target.server,
        "url": session.target.url,
        "model": session.target.model,
        "began": session.began,
        **{f"client: {name}": fact for name, fact in session.machine.items()},
    }
    rows = "".join(
        f'<tr><th scope="row">{escape(plain(name))}</th><td>{escape(plain(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    table = f'<div class="wide"><table class="facts"><tbody>{rows}</tbody></table></div>'
    again = f"<h3>To repeat it</h3>{_code(session.command)}"
    return _section("Environment", table + again)


# -- pieces ----------------------------------------------------------------------------------------


def _section(name: str, body: str) -> str:
    key = name.lower()
    return f'<section aria-labelledby="{key}">\n<h2 id="{key}">{name}</h2>\n{body}\n</section>'


def _table(
    caption: str,
    headings: Iterable[str],
    rows: Iterable[tuple[Sequence[str], bool]],
    kind: str = "",
) -> str:
    """Return a table; failed rows are marked, and the class ``kind`` selects columns of text."""
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    body = "\n".join(_row(cells, has_failed) for cells, has_failed in rows)
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[str], has_failed: bool) -> str:
    mark = ' class="failed"' if has_failed else ""
    return f"<tr{mark}>{''.join(map(_cell, cells))}</tr>"


def _cell(text: str) -> str:
    """Return a cell, with a spread below its median: in one line, tables were twice as wide."""
    median, mark, spread = text.partition(" (")
    is_spread = bool(mark) and spread.endswith(")") and median[:1].isdigit()
    if is_spread:
        return f"<td>{escape(median)}<small> ({escape(spread)}</small></td>"
    return f"<td>{escape(text)}</td>"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"


def _code(text: str) -> str:
    return f'<pre tabindex="0"><code>{escape(text)}</code></pre>'
