import pytest
from measurements import REFUSED, run, session

from marserve.tools.bench.measurement import Point
from marserve.tools.bench.reports.summary import (
    FIGURES,
    Spread,
    format_point,
    number,
    plain,
    summarise,
)

FIGURE = {figure.name: figure for figure in FIGURES}


def test_repetitions_are_told_by_the_median_of_their_own_percentiles():
    """Pooled, the long run would speak for all three."""
    runs = [run(latencies_ms=[slowest] * count) for slowest, count in ((1, 10), (5, 10), (9, 1000))]
    (summary,) = summarise(session(*runs))
    assert summary.spread(FIGURE["p99_ms"]) == Spread(5, 1, 9, 3)
    assert summary.spread(FIGURE["throughput_per_s"]) == Spread(5, 5, 500, 3)


def test_runs_of_a_point_belong_together_wherever_they_stand():
    one, other = Point(clients=1), Point(clients=2)
    summaries = summarise(session(run(one), run(other), run(one)))
    assert [(summary.point, len(summary.runs)) for summary in summaries] == [(one, 2), (other, 1)]


def test_one_failed_run_fails_its_point():
    point = REFUSED.point
    (summary,) = summarise(session(run(point), REFUSED))
    assert summary.has_failed
    assert [summary.spread(figure) for figure in FIGURES] == [None] * len(FIGURES)
    assert summary.errors == {"503": 999}


def test_within_the_allowed_share_errors_do_not_fail_a_point():
    (summary,) = summarise(session(run(errors={"503": 1}), allowed=0.5))
    assert not summary.has_failed
    assert summary.spread(FIGURE["throughput_per_s"]) == Spread(2, 2, 2)


def test_what_only_some_runs_know_is_told_of_those():
    (summary,) = summarise(session(run(mean_batch=3.0), run()))
    assert summary.spread(FIGURE["mean_batch"]) == Spread(3, 3, 3)


@pytest.mark.parametrize(
    ("point", "words"),
    [
        (Point(), ""),
        (Point(clients=1, workers=1), "1 client, 1 worker"),
        (Point(rate=12.5, batch_size=1), "12.5 requests/s, batch size 1"),
        (Point(batch_policy="adaptive", max_latency_ms=50), "policy adaptive, goal 50 ms"),
    ],
)
def test_a_point_in_words(point, words):
    assert format_point(point) == words


@pytest.mark.parametrize(
    ("value", "text"), [(0.01234, "0.0123"), (12.34, "12.3"), (123456.7, "123457"), (0.0, "0")]
)
def test_numbers_have_three_digits_that_count(value, text):
    assert number(value) == text


def test_a_terminal_obeys_no_name():
    assert plain("\x1b[2Jmodel") == r"'\x1b[2Jmodel'"
