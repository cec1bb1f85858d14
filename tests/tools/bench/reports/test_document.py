import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measurements import REFUSED, run, session, sweep

from marserve.tools.bench.measurement import Point, Session
from marserve.tools.bench.recommendation import Choice, Goal, Recommendation, Trial
from marserve.tools.bench.reports.document import CSV_COLUMNS, as_csv, as_json, histogram

SCHEMA = json.loads(
    (Path(__file__).parents[4] / "docs/bench-report.schema.json").read_text(encoding="utf-8")
)
GOAL = Goal(percent=99, latency_ms=50)
FULL, OPEN = run(Point(clients=2, workers=1, batch_size=1)), run(Point(rate=1.6, batch_size=1))
FOUND = Recommendation(
    GOAL, Choice(FULL, OPEN), [Trial(FULL, "", False), Trial(REFUSED, "no", True)]
)


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def parsed(found: Session, recommendation: Recommendation | None = None) -> Any:
    text = as_json(found, recommendation)
    return json.loads(text, parse_constant=refuse_constant)


def rows_of(found: Session) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(found), newline="")))


@pytest.mark.parametrize(
    "found",
    [
        session(),
        sweep(repeat=2),
        session(run(latencies_ms=[])),
        session(REFUSED),
        session(run(Point(clients=1, batch_size="auto", torch_threads="auto"))),
        session(run(mean_batch=2.5, first_inference_ms=9, timeline=[2, 2], errors={"503": 1})),
        session(run(goal_ms=2.5, refused=3)),
    ],
    ids=["nothing", "sweep", "no answers", "refused", "automatic", "all figures", "goal"],
)
@pytest.mark.parametrize("recommendation", [None, FOUND, Recommendation(GOAL, None, [])])
def test_json_is_what_the_schema_in_docs_says(found, recommendation):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(parsed(found, recommendation), SCHEMA)


def test_json_has_every_run_and_its_figures():
    document = parsed(session(run(latencies_ms=[1, 2, 3, 10], seconds=4, first_inference_ms=7)))
    ((one,),) = (point["runs"] for point in document["points"])
    assert (one["answers"], one["throughput_per_s"], one["mean_ms"]) == (4, 1, 4)
    assert (one["p50_ms"], one["p99_ms"], one["first_inference_ms"]) == (2, 10, 7)
    assert one["percentiles_ms"]["0"] == 1
    assert one["percentiles_ms"]["100"] == 10


@pytest.mark.parametrize("broken", [REFUSED, run(latencies_ms=[])], ids=["refused", "no answers"])
def test_of_a_failed_run_no_figure_is_given(broken):
    (point,) = parsed(session(broken))["points"]
    (one,) = point["runs"]
    assert (point["status"], one["status"]) == ("failed", "failed")
    assert one["failure"]
    assert set(point["summary"].values()) == {None}
    assert {one[name] for name in point["summary"]} == {None}
    (row,) = rows_of(session(broken))
    assert row["status"] == "failed"
    assert {row[name] for name in point["summary"]} == {""}
    assert row["max_ms"] == ""


@given(st.lists(st.floats(0, 1e7), max_size=200).map(sorted))
def test_a_histogram_holds_every_answer_within_its_limits(latencies):
    buckets = histogram(latencies)
    limits = [item["up_to_ms"] for item in buckets]
    assert sum(item["count"] for item in buckets) == len(latencies)
    assert limits == sorted(set(limits))
    left = iter(latencies)
    for bucket in buckets:
        ones = [next(left) for _ in range(int(bucket["count"]))]
        low = bucket["up_to_ms"] / 10**0.01
        assert all(item <= bucket["up_to_ms"] * 1.001 for item in ones)
        assert all(item > low / 1.001 or item < 2e-6 for item in ones)


def test_csv_has_a_row_per_run_under_columns_that_stay():
    rows = rows_of(sweep(repeat=2))
    assert [row["run"] for row in rows] == [str(number) for number in range(1, 13)]
    assert tuple(rows[0]) == CSV_COLUMNS
    assert CSV_COLUMNS[:17] == (
        "began",
        "server",
        "url",
        "model",
        "run",
        "clients",
        "rate",
        "workers",
        "batch_size",
        "batch_policy",
        "max_batch_delay_ms",
        "max_latency_ms",
        "precision",
        "torch_threads",
        "outstanding_batches",
        "status",
        "seconds",
    )
    assert (rows[0]["clients"], rows[0]["rate"], rows[0]["batch_size"]) == ("1", "", "1")
    assert float(rows[1]["p99_ms"]) == 2 * float(rows[0]["p99_ms"])


def test_a_run_with_a_goal_has_its_figures_in_the_last_columns():
    (row,) = rows_of(session(run(goal_ms=2.5, refused=4)))
    figures = {"goal_ms": "2.5", "in_time_percent": "25.0", "in_time_per_s": "1.0"}
    assert dict([*row.items()][-6:-1]) == {**figures, "refused": "4", "late": "2"}
    assert (row["status"], row["errors"]) == ("ok", "0")


def test_csv_keeps_names_in_their_cells_and_runs_no_formula():
    (row,) = rows_of(session(run(errors={"a,b": 1}), model='=HYPERLINK("x")\n,', allowed=1))
    assert row["model"] == '\'=HYPERLINK("x")\n,'
    assert row["errors_by_kind"] == "a,b: 1"
    assert not math.isnan(float(row["throughput_per_s"]))
