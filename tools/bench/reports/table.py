"""The report for a terminal, and the cells of tables, which the HTML page uses, too."""

from collections.abc import Sequence
from dataclasses import dataclass

from marserve.tools.bench.measurement import Session, format_kinds
from marserve.tools.bench.reports.columns import aligned
from marserve.tools.bench.reports.summary import (
    FAILED,
    FIGURES,
    FIRST_INFERENCE,
    GOAL_FIGURES,
    NOTHING,
    SETTINGS,
    Figure,
    Setting,
    Summary,
    format_point,
    number,
    plain,
    summarise,
    varied,
)

# With fewer answers, p99.9 is the slowest answer.
_ENOUGH = 1000


@dataclass(frozen=True)
class Columns:
    """The columns of a table; the last one contains the number of errors.

    Attributes:
        settings: The settings that vary; those that all points share are in the heading.
        figures: The figures that any run has.
    """

    settings: Sequence[Setting]
    figures: Sequence[Figure]

    @classmethod
    def of(cls, summaries: Sequence[Summary]) -> "Columns":
        """Return the columns for the points of a session."""
        runs = [run for summary in summaries for run in summary.runs]
        with_goal = GOAL_FIGURES if any(run.goal_ms is not None for run in runs) else ()
        is_first_known = any(run.first_inference_ms is not None for run in runs)
        first = (FIRST_INFERENCE,) if is_first_known else ()
        settings = varied([summary.point for summary in summaries])
        return cls(settings, (*with_goal, *FIGURES, *first))

    @property
    def headings(self) -> list[str]:
        """Return the headings."""
        figures = [figure.heading for figure in self.figures]
        return [*(setting.heading for setting in self.settings), *figures, "errors"]

    def cells(self, summary: Summary) -> list[str]:
        """Return the cells of a point."""
        figures = [
            FAILED if summary.has_failed and figure is self.figures[0] else _text(summary, figure)
            for figure in self.figures
        ]
        settings = [plain(setting.of(summary.point)) for setting in self.settings]
        return [*settings, *figures, str(summary.errors.total())]


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
    where = "" if is_alone else f"{format_point(summary.point)}: "
    if summary.has_failed:
        failures = dict.fromkeys(filter(None, summary.failures))
        return f"{where}{' '.join(f'{FAILED}: {failure}' for failure in failures)}"
    requests = sum(run.requests for run in summary.runs)
    failed = f"{summary.errors.total()} of {requests} requests failed"
    return f"{where}{failed}: {format_kinds(summary.errors)}."


def notes(summaries: Sequence[Summary]) -> list[str]:
    """Return sentences that explain the numbers."""
    sentences = []
    goals = {run.goal_ms for summary in summaries for run in summary.runs} - {None}
    if goals:
        named = f" of {number(goals.pop() or 0)} ms" if len(goals) == 1 else ""
        sentences.append(
            f"In time: answered within the latency goal{named}, of all requests; late: after it; "
            "refused: 503 with Retry-After."
        )
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


def _text(summary: Summary, figure: Figure) -> str:
    spread = summary.spread(figure)
    return NOTHING if spread is None else str(spread)
