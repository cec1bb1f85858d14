"""Reports on disk."""

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
    """Write the reports that are asked for.

    Args:
        session: What was measured.
        recommendation: What tuning made of it, told in JSON and HTML.
        json: Where the JSON goes.
        csv: Where the CSV goes.
        html: Where the page goes.

    Raises:
        OSError: A file cannot be written; a sentence for each, with its name and the reason. The
            other reports are written all the same: measuring again would take longer.
    """
    wanted: list[tuple[Path | None, Callable[[], str]]] = [
        (json, lambda: as_json(session, recommendation)),
        (csv, lambda: as_csv(session)),
        (html, lambda: _page(session, recommendation)),
    ]
    complaints = [_write(path, made()) for path, made in wanted if path is not None]
    if any(complaints):
        raise OSError(" ".join(filter(None, complaints)))


def check_writable(path: Path) -> None:
    """Find out before measuring whether a report can be written, and leave the file as it is.

    Raises:
        OSError: It cannot; one sentence that names the file and the reason.
    """
    is_new = not path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise OSError(_complaint(path, error)) from error


def _page(session: Session, recommendation: Recommendation | None) -> str:
    # Here, for who asks for no page needs neither it nor what draws its pictures.
    from marserve.tools.bench.reports.page import as_html

    return as_html(session, recommendation)


def _write(path: Path, text: str) -> str:
    """Returns a complaint, empty where all went well."""
    try:
        path.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        return _complaint(path, error)
    return ""


def _complaint(path: Path, error: OSError) -> str:
    return f"The report {path} cannot be written: {error.strerror or error}."
