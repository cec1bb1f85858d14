"""The report for a terminal, and the cells of tables, which the HTML page uses, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from marserve.tools.bench.measurement import Session
from marserve.tools.bench.reports.columns import aligned
from marserve.tools.bench.reports.summary import (
    FAILED,
    FIGURES,
    FIRST_INFERENCE,
    NOTHING,
    SETTINGS,
    Figure,
    Setting,
    Summary,
    format_point,
    plain,
    summarise,
    varied,
)

# With fewer answers, p99.9 is the slowest answer.
_ENOUGH = 1000


@dataclass(frozen=True)
class Columns:
    """The columns of a table.

    Attributes:
        settings: The settings that vary; those that all points share are in the heading.
        figures: All figures; the first inference only if one was measured.
    """

    settings: Sequence[Setting]
    figures: Sequence[Figure]

    @classmethod
    def of(cls, summaries: Sequence[Summary]) -> "Columns":
        """Return the columns for the points of a session."""
        runs = (run for summary in summaries for run in summary.runs)
        is_first_known = any(run.first_inference_ms is not None for run in runs)
        first = (FIRST_INFERENCE,) if is_first_known else ()
        return cls(varied([summary.point for summary in summaries]), (*FIGURES, *first))

    @property
    def headings(self) -> list[str]:
        """Return the headings; errors are between the figures and the first inference."""
        figures = [figure.heading for figure in self.figures]
        return [*(setting.heading for setting in self.settings), *_with_errors(figures, "errors")]

    def cells(self, summary: Summary) -> list[str]:
        """Return the cells of a point."""
        figures = [
            FAILED if summary.has_failed and figure is FIGURES[0] else _text(summary, figure)
            for figure in self.figures
        ]
        errors = str(sum(summary.errors.values()))
        settings = [plain(setting.of(summary.point)) for setting in self.settings]
        return [*settings, *_with_errors(figures, errors)]


def table(session: Session) -> str:
    """Return the report of a session for a terminal."""
    summaries = summarise(session)
    if not summaries:
        return "Nothing was measured."
    columns = Columns.of(summaries)
    lines = [columns.headings, *(columns.cells(summary) for summary in summaries)]
    parts = [_heading(session, summaries), aligned(lines), "\n".join(notes(summaries))]
    return "\n\n".join(filter(None, [*parts, *_error_part(summaries)]))


def shared_settings(summaries: Sequence[Summary]) -> str:
    """Return the settings that all points share, as text; empty if there are none."""
    points = [summary.point for summary in summaries]
    common = [setting for setting in SETTINGS if setting not in varied(points)]
    return format_point(points[0], common) if points else ""


def _heading(session: Session, summaries: Sequence[Summary]) -> str:
    target = session.target
    what = f"{plain(target.server)} at {plain(target.url)}, model {plain(target.model)}"
    machine = ", ".join(f"{plain(name)} {plain(fact)}" for name, fact in session.machine.items())
    where = f"measured from: {machine}, {plain(session.began)}"
    return "\n".join(filter(None, (what, shared_settings(summaries), where)))


def format_errors(summaries: Sequence[Summary]) -> list[str]:
    """Return a sentence for each point with errors: their numbers by kind, and failures."""
    return [
        _errors_of(summary, len(summaries) == 1)
        for summary in summaries
        if summary.errors or summary.has_failed
    ]


def _errors_of(summary: Summary, is_alone: bool) -> str:
    kinds = ", ".join(f"{plain(kind)} ({count})" for kind, count in summary.errors.items())
    requests = sum(run.answers + run.failed for run in summary.runs)
    failures = " ".join(
        f"{FAILED}: {failure}" for failure in dict.fromkeys(filter(None, summary.failures))
    )
    where = "" if is_alone else f"{format_point(summary.point)}: "
    errors = f"{sum(summary.errors.values())} of {requests} requests failed"
    return f"{where}{errors}{': ' if kinds else ''}{kinds}. {failures}".rstrip()


def notes(summaries: Sequence[Summary]) -> list[str]:
    """Return sentences that explain the numbers."""
    sentences = []
    if any(len(summary.runs) > 1 for summary in summaries):
        sentences.append(
            "Median (smallest-largest) over the runs of a point; percentiles are of a run."
        )
    if any(0 < run.answers < _ENOUGH for summary in summaries for run in summary.runs):
        sentences.append(
            f"Of fewer than {_ENOUGH} answers, p99.9 is the slowest: measure longer for a p99.9."
        )
    return sentences


def _error_part(summaries: Sequence[Summary]) -> list[str]:
    errors = format_errors(summaries)
    return ["\n".join(["Errors", *(f"  {error}" for error in errors)])] if errors else []


def _with_errors(figures: Sequence[str], errors: str) -> list[str]:
    return [*figures[: len(FIGURES)], errors, *figures[len(FIGURES) :]]


def _text(summary: Summary, figure: Figure) -> str:
    spread = summary.spread(figure)
    return NOTHING if spread is None else str(spread)
