"""Writes the reports to files."""

from collections.abc import Callable
from pathlib import Path

from marserve.tools.bench.measurement import Session
from marserve.tools.bench.recommendation import Recommendation
from marserve.tools.bench.reports.document import as_csv, as_json


def write_reports(
    session: Session,
    recommendation: Recommendation | None = None,
    *,
    json: Path | None = None,
    csv: Path | None = None,
    html: Path | None = None,
) -> None:
    """Write the reports that have a path.

    Args:
        session: The measurements.
        recommendation: The result of tuning, for JSON and HTML.
        json: Path of the JSON report.
        csv: Path of the CSV report.
        html: Path of the HTML page.

    Raises:
        OSError: A file cannot be written; a sentence for each, with its name and the reason. The
            other reports are written nevertheless.
    """
    wanted: list[tuple[Path | None, Callable[[], str]]] = [
        (json, lambda: as_json(session, recommendation)),
        (csv, lambda: as_csv(session)),
        (html, lambda: _page(session, recommendation)),
    ]
    errors = [_write(path, made()) for path, made in wanted if path is not None]
    if any(errors):
        raise OSError(" ".join(filter(None, errors)))


def check_writable(path: Path) -> None:
    """Check that a report can be written, without changing the file.

    Raises:
        OSError: It cannot be written; one sentence with its name and the reason.
    """
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise OSError(_message(path, error)) from error


def _page(session: Session, recommendation: Recommendation | None) -> str:
    # Imported here, because only the page needs it and matplotlib.
    from marserve.tools.bench.reports.page import as_html

    return as_html(session, recommendation)


def _write(path: Path, text: str) -> str:
    """Write a file; return an error message, empty after success."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        return _message(path, error)
    return ""


def _message(path: Path, error: OSError) -> str:
    return f"The report {path} cannot be written: {error.strerror or error}."
