"""``marserve bench`` from the command line to the exit status."""

import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from marserve.frontend.lifecycle.terminal import print_text
from marserve.tools.bench.bench import Bench
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.measurement import Point, Session
from marserve.tools.bench.options import Options, read_options, without_secrets
from marserve.tools.bench.progress import progress
from marserve.tools.bench.recommendation import Goal, Recommendation
from marserve.tools.bench.reports.files import check_writable, write_reports
from marserve.tools.bench.reports.summary import format_point
from marserve.tools.bench.reports.table import table

_FAILED = 1
_INTERRUPTED = 130  # 128 plus the number of SIGINT, as shells report it
_PERCENTILE = 99.0
_REPORTS = ("json", "csv", "html")


def main(arguments: Sequence[str]) -> int:
    """Run ``marserve bench``.

    Args:
        arguments: The arguments after ``bench``.

    Returns:
        The exit status: 0 only if no run had more errors than allowed, and a search found settings.
    """
    options = read_options(arguments)
    # SIGTERM also has to restore the server's settings.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        reports = _reports(options)
        return _run(
            options, shlex.join(["marserve", "bench", *without_secrets(arguments)]), reports
        )
    except (BenchError, OSError) as error:
        for sentence in _sentences(error) or [str(error)]:
            _print_error(sentence)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: Options, command: str, reports: Mapping[str, Path]) -> int:
    """Measure and print the report, also after a failure or an interrupt."""
    points = options.sweep.points()
    total = None if options.tune else len(points) * options.repeat
    display = progress(total, is_wanted=not options.no_progress)
    bench = Bench(options, command, display)
    if options.validate:
        display.close()
        return _validate(bench, points)
    recommendation = None
    try:
        if options.tune:
            recommendation = bench.tune(_goal(options))
        else:
            bench.run(points)
    finally:
        display.close()
        for sentence in bench.warnings():
            print_text(sentence, sys.stderr)
        if bench.measurements:
            _report(options.model, bench.session, recommendation, reports)
    return _judge(bench.session, recommendation)


def _validate(bench: Bench, points: Sequence[Point]) -> int:
    """Print the comparison at each point; return 0 if batching changes no answer at any of them."""
    status = 0
    for found in bench.validate(points):
        print_text(found.text)
        if found.failure:
            _print_error(found.failure)
            status = _FAILED
    return status


def _goal(options: Options) -> Goal:
    assert options.tune is not None
    percent = _PERCENTILE if options.percentile is None else options.percentile
    try:
        return Goal(percent=percent, latency_ms=options.tune)
    except ValueError as error:
        raise BenchError(str(error)) from None


def _reports(options: Options) -> Mapping[str, Path]:
    """Return the paths of the reports by format.

    Raises:
        OSError: A report cannot be written. Checked before anything is measured.
    """
    reports = {kind: path for kind in _REPORTS if (path := getattr(options, kind)) is not None}
    if options.output_dir is not None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        name = f"{options.model}-{time.strftime('%Y%m%d-%H%M%S')}"
        for kind in _REPORTS:
            reports.setdefault(kind, options.output_dir / f"{name}.{kind}")
    for path in reports.values():
        check_writable(path)
    return reports


def _report(
    model: str,
    session: Session,
    recommendation: Recommendation | None,
    reports: Mapping[str, Path],
) -> None:
    # The text of a recommendation includes the table of rejected points.
    print_text(table(session) if recommendation is None else recommendation.text(model))
    write_reports(session, recommendation, **reports)


def _judge(session: Session, recommendation: Recommendation | None) -> int:
    """Return the exit status; after a search it depends on the recommendation only."""
    if recommendation is not None:
        return _FAILED if recommendation.choice is None else 0
    allowed = session.allowed_error_share
    failures = [
        f"{format_point(measurement.point)}: {failure}"
        for measurement in session.measurements
        if (failure := measurement.failure(allowed))
    ]
    for failure in failures:
        _print_error(failure)
    return _FAILED if failures else 0


def _sentences(error: BaseException | None) -> list[str]:
    """Return the message of an error and of those before it: restoring settings can fail, too."""
    sentences: list[str] = []
    while isinstance(error, BenchError):
        if not any(str(error) in sentence for sentence in sentences):
            sentences.insert(0, str(error))
        error = error.__context__
    return sentences


def _print_error(sentence: str) -> None:
    print_text(f"marserve bench: {sentence}", sys.stderr)
