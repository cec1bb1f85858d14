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
_INTERRUPTED = 130  # 128 and the number of SIGINT: what shells expect
_PERCENTILE = 99.0
_REPORTS = ("json", "csv", "html")


def main(arguments: Sequence[str]) -> int:
    """Runs ``marserve bench``.

    Args:
        arguments: What follows ``bench``.

    Returns:
        The exit status: 0 only if every run was within the errors that are allowed.
    """
    options = read_options(arguments)
    # Whoever ends us in another way than with Ctrl-C wants the server back as it was, too.
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
    """Measure, and tell what was measured, also if it was less than was wanted."""
    points = options.sweep.points()
    total = None if options.tune else len(points) * options.repeat
    news = progress(total, is_wanted=not options.no_progress)
    bench = Bench(options, command, news)
    if options.validate:
        news.close()
        return _validate(bench, points)
    recommendation = None
    try:
        if options.tune:
            recommendation = bench.tune(_goal(options))
        else:
            bench.run(points)
    finally:
        news.close()
        if bench.measurements:
            _report(options.model, bench.session, recommendation, reports)
    return _judge(bench.session, recommendation)


def _validate(bench: Bench, points: Sequence[Point]) -> int:
    """Whether batching changes no answer, at any of the points."""
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
    """Which reports to write, and where; that they cannot be is said before anything is measured.

    Raises:
        OSError: One cannot be written.
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
    # The text of a recommendation has the table of what was tried.
    print_text(table(session) if recommendation is None else recommendation.text(model))
    write_reports(session, recommendation, **reports)


def _judge(session: Session, recommendation: Recommendation | None) -> int:
    """Whether the numbers are worth anything; where there is a recommendation, it alone."""
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
    """What went wrong, and what before: who puts things back may fail at that, too."""
    sentences: list[str] = []
    while isinstance(error, BenchError):
        if not any(str(error) in sentence for sentence in sentences):
            sentences.insert(0, str(error))
        error = error.__context__
    return sentences


def _print_error(sentence: str) -> None:
    print_text(f"marserve bench: {sentence}", sys.stderr)
