"""The reports for programs: JSON with the whole session, CSV with one row per run.

docs/bench-report.schema.json describes the JSON; every change of it increments `VERSION`. Unknown
figures (NaN) and all figures of failed runs are null in JSON and empty in CSV, because the speed of
refusals means nothing.
"""

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from marserve.tools.bench.measurement import Measurement, Point, Session
from marserve.tools.bench.recommendation import Recommendation
from marserve.tools.bench.reports.summary import (
    FIGURES,
    FIRST_INFERENCE,
    GOAL_FIGURES,
    SETTINGS,
    Figure,
    Spread,
    Summary,
    summarise,
)

FORMAT = "marserve-bench"
VERSION = 1

_PERCENTS = (0, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9, 99.99, 100)
# Adjacent limits differ by 2.3 %, less than the difference between equal runs.
_BUCKETS_PER_DECADE = 100

_HINT = "performance_hint"  # a setting that has been added since
# The order is fixed for programs that read columns by number: append new columns.
CSV_COLUMNS = (
    "began",
    "server",
    "url",
    "model",
    "run",
    *(setting.name for setting in SETTINGS if setting.name != _HINT),
    "status",
    "seconds",
    "answers",
    "errors",
    *(figure.name for figure in FIGURES),
    "max_ms",
    FIRST_INFERENCE.name,
    "errors_by_kind",
    "goal_ms",
    *(figure.name for figure in GOAL_FIGURES),
    _HINT,
)
_ALL_FIGURES = (*FIGURES, FIRST_INFERENCE, *GOAL_FIGURES)


def as_json(session: Session, recommendation: Recommendation | None = None) -> str:
    """Return the session as JSON, with histograms of the latencies."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "began": session.began,
        "command": session.command,
        "target": vars(session.target),
        "machine": dict(session.machine),
        "allowed_error_share": session.allowed_error_share,
        "points": [_point(item) for item in summarise(session)],
        "recommendation": recommendation.document() if recommendation else None,
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def as_csv(session: Session) -> str:
    """Return one row per run with the columns `CSV_COLUMNS`, with the line ends of RFC 4180."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_COLUMNS)
    writer.writeheader()
    writer.writerows(_rows(session))
    return text.getvalue()


def histogram(latencies_ms: Sequence[float]) -> list[dict[str, float]]:
    """Return a histogram of latencies.

    Args:
        latencies_ms: Latencies in ascending order, milliseconds.

    Returns:
        The buckets that are not empty, in ascending order. A bucket contains the latencies up to
        its limit and above a limit that is 2.3 % lower.
    """
    return [
        {"up_to_ms": _limit(bucket), "count": len(list(ones))}
        for bucket, ones in groupby(latencies_ms, _bucket)
    ]


def _bucket(latency_ms: float) -> int:
    return math.ceil(math.log10(max(latency_ms, 1e-6)) * _BUCKETS_PER_DECADE)


def _limit(bucket: int) -> float:
    return float(f"{10 ** (bucket / _BUCKETS_PER_DECADE):.4g}")


def _point(summary: Summary) -> dict[str, Any]:
    return {
        "settings": _settings(summary.point),
        "status": _status(summary.has_failed),
        "summary": {figure.name: _spread(summary.spread(figure)) for figure in _ALL_FIGURES},
        "runs": [_run(*item) for item in zip(summary.runs, summary.failures, strict=True)],
    }


def _settings(point: Point) -> dict[str, int | float | str | None]:
    return {setting.name: setting.of(point) for setting in SETTINGS}


def _status(has_failed: object) -> str:
    return "failed" if has_failed else "ok"


def _spread(spread: Spread | None) -> Mapping[str, float] | None:
    return None if spread is None else vars(spread)


def _run(run: Measurement, failure: str) -> dict[str, Any]:
    return {
        "status": _status(failure),
        "failure": failure,
        "seconds": run.seconds,
        "answers": run.answers,
        "errors": dict(run.errors),
        "goal_ms": run.goal_ms,
        **_figures(run, failure),
        "percentiles_ms": (
            {} if failure else {f"{percent:g}": run.percentile_ms(percent) for percent in _PERCENTS}
        ),
        "histogram": histogram(run.latencies_ms),
        "answers_per_second": list(run.timeline),
    }


def _figures(run: Measurement, failure: str) -> dict[str, float | None]:
    def value(figure: Figure) -> float | None:
        return None if failure else figure.of(run)

    return {item.name: value(item) for item in _ALL_FIGURES}


def _rows(session: Session) -> list[dict[str, object]]:
    rows = []
    for number, run in enumerate(session.measurements, start=1):
        failure = run.failure(session.allowed_error_share)
        rows.append(
            {
                "began": session.began,
                **{key: _escape_formula(value) for key, value in vars(session.target).items()},
                "run": number,
                **{key: _escape_formula(value) for key, value in _settings(run.point).items()},
                "status": _status(failure),
                "seconds": run.seconds,
                "answers": run.answers,
                "errors": run.failed,
                "goal_ms": run.goal_ms,
                **_figures(run, failure),
                "max_ms": None if failure else run.percentile_ms(100),
                "errors_by_kind": _escape_formula(
                    "; ".join(f"{kind}: {count}" for kind, count in run.errors.items())
                ),
            }
        )
    return rows


def _escape_formula(value: object) -> object:
    """Quote texts that a spreadsheet would run as formulas, such as names of models."""
    is_formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if is_formula else value
