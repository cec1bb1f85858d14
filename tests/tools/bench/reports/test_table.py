from measurements import REFUSED, run, session, sweep

from marserve.tools.bench.measurement import Point
from marserve.tools.bench.reports.table import table


def lines_of(text: str) -> list[list[str]]:
    """Heading and rows of the table in a report, cell by cell; no cell here has two spaces."""
    _, body, *_ = text.split("\n\n")
    return [[cell for cell in line.split("  ") if cell] for line in body.splitlines()]


def test_only_what_varies_has_a_column():
    heading, *rows = lines_of(table(sweep()))
    assert [item.strip() for item in heading[:3]] == ["clients", "batch size", "answers/s"]
    assert len(rows) == 6


def test_what_all_points_share_is_said_once_above():
    text = table(session(run(Point(clients=8, workers=2)), run(Point(clients=9, workers=2))))
    assert text.splitlines()[1] == "2 workers"


def test_a_line_has_the_figures_and_the_first_inference_apart():
    found = run(latencies_ms=range(1, 101), seconds=10, mean_batch=3.2, first_inference_ms=812)
    heading, row = lines_of(table(session(found)))
    assert dict(zip(map(str.strip, heading), map(str.strip, row), strict=True)) == {
        "answers/s": "10",
        "p50 ms": "50",
        "p90 ms": "90",
        "p99 ms": "99",
        "p99.9 ms": "100",
        "mean ms": "50.5",
        "mean batch": "3.2",
        "errors": "0",
        "first ms": "812",
    }


def test_repeated_runs_show_how_far_they_differ():
    text = table(session(run(latencies_ms=[1]), run(latencies_ms=[3]), run(latencies_ms=[2])))
    assert " 2 (1-3) " in text
    assert "Median (smallest-largest) over the runs" in text


def test_a_throughput_made_of_errors_is_never_shown():
    text = table(session(run(), REFUSED))
    _, _, failed = lines_of(text)
    assert [item.strip() for item in failed] == ["500", "FAILED", *["-"] * 6, "999"]
    failure = "FAILED: 99.90% of the requests failed, 0.00% are allowed: 503 (999)."
    assert f"500 clients: {failure}" in text


def test_under_a_goal_the_columns_say_what_was_in_time_late_and_refused():
    found = run(latencies_ms=[10, 20, 50, 60], goal_ms=50, refused=2, seconds=2)
    text = table(session(found))
    heading, row = lines_of(text)
    cells = dict(zip(map(str.strip, heading), map(str.strip, row), strict=True))
    assert cells["in time %"] == "50"
    assert cells["in time/s"] == "1.5"
    assert (cells["refused"], cells["late"], cells["errors"]) == ("2", "1", "0")
    assert cells["answers/s"] == "2"
    assert "In time: answered within the latency goal of 50 ms, of all requests" in text
    assert "FAILED" not in text


def test_without_a_goal_nothing_is_in_time_or_late():
    assert "in time" not in table(session(run()))


def test_allowed_errors_are_told_all_the_same():
    text = table(session(run(errors={"503": 1, "connection reset": 3}), allowed=0.5))
    assert "4 of 8 requests failed: connection reset (3), 503 (1)." in text
    assert "FAILED" not in text


def test_nothing_measured_is_said():
    assert table(session()) == "Nothing was measured."


def test_columns_are_aligned():
    body = table(sweep(repeat=3)).split("\n\n")[1].splitlines()
    assert len({len(line) for line in body}) == 1


def test_that_a_percentile_is_only_the_slowest_answer_is_said():
    assert "p99.9 is the slowest" in table(session(run(latencies_ms=range(1, 1000))))
    assert "p99.9 is the slowest" not in table(session(run(latencies_ms=range(1, 1001))))
