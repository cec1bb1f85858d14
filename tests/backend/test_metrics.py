import copy
import json
import logging
import uuid
from fractions import Fraction

import pytest

from marserve.backend.errors import (
    MetricsCacheKeyError,
    MetricsCacheTypeError,
    MetricsCacheValueError,
)
from marserve.backend.metrics import (
    CachingMetric,
    Dimension,
    Metric,
    MetricsStore,
    MetricTypes,
    emit_metrics,
)

DEFAULTS = [["ModelName", "kitten"], ["Level", "Model"]]


@pytest.fixture
def metrics():
    return MetricsStore({0: "a", 1: "b"}, "kitten")


@pytest.mark.parametrize(
    ("report", "row"),
    [
        (lambda m: m.add_counter("N", 2), ["counter", "N", "Count", 2.0]),
        (lambda m: m.add_time("N", 2.5), ["gauge", "N", "Milliseconds", 2.5]),
        (lambda m: m.add_time("N", 2, None, "s"), ["gauge", "N", "Seconds", 2.0]),
        (lambda m: m.add_size("N", 2), ["gauge", "N", "Megabytes", 2.0]),
        (lambda m: m.add_size("N", 2, unit="kB"), ["gauge", "N", "Kilobytes", 2.0]),
        (lambda m: m.add_percent("N", 50), ["gauge", "N", "Percent", 50.0]),
        (lambda m: m.add_metric("N", 2, "ms"), ["counter", "N", "Milliseconds", 2.0]),
        (
            lambda m: m.add_metric("N", -2, "cats", metric_type=MetricTypes.HISTOGRAM),
            ["histogram", "N", "cats", -2.0],
        ),
    ],
)
def test_each_call_is_one_row(metrics, report, row):
    report(metrics)
    assert metrics.drain() == [[*row, DEFAULTS, ["a", "b"]]]


def test_whole_numbers_stay_whole(metrics):
    metrics.add_counter("N", 2)
    metrics.add_counter("N", True)
    metrics.add_time("T", 2.0)
    assert [repr(each.value) for each in metrics.store] == ["3", "2.0"]


def test_rows_survive_json_and_are_handed_over_once(metrics):
    metrics.add_time("T", 1, dimensions=[Dimension("City", 7)])
    rows = metrics.drain()

    assert json.loads(json.dumps(rows)) == rows
    assert rows[0][4] == [["City", "7"], *DEFAULTS]
    assert metrics.drain() == []


def test_rows_put_back_are_handed_over_again_before_later_ones(metrics):
    metrics.add_counter("Early", 1)
    early = metrics.drain()
    metrics.add_counter("Late", 1)
    metrics.put_back(early)
    assert [row[1] for row in metrics.drain()] == ["Early", "Late"]


def test_index_picks_one_request(metrics):
    metrics.add_counter("N", 1, 1)
    assert metrics.drain()[0][5] == ["b"]


@pytest.mark.parametrize("idx", [2, "percent"])
def test_what_is_no_index_of_the_batch_stands_for_all_requests(metrics, idx):
    metrics.add_counter("N", 1, idx)
    assert metrics.drain()[0][5] == ["a", "b"]


def test_none_for_no_dimensions(metrics):
    metrics.add_counter("N", 1, None, None)
    metrics.add_error("E", 1, None)
    metrics.add_metric_to_cache("Cats", "count", None).add_or_update(1, None)
    assert [row[4] for row in metrics.drain()] == [
        DEFAULTS,
        [["ModelName", "kitten"], ["Level", "Error"]],
        [],
    ]


def test_one_id_for_everything_as_in_a_test_of_a_handler():
    some_id = uuid.uuid4()
    metrics = MetricsStore(some_id, "kitten")
    metrics.add_counter("N", 1, 0)
    assert metrics.drain()[0][4:] == [DEFAULTS, [str(some_id)]]


def test_store_shows_what_was_reported_and_reporting_it_again_counts_nothing(metrics):
    metrics.add_counter("Cats", 2)
    metrics.add_counter("Cats", 3)
    metrics.add_time("T", 5, 0)
    metrics.add_time("T", 7, 0)

    seen = [(each.name, each.value, each.unit, each.request_id) for each in metrics.store]
    assert seen == [("Cats", 5, "Count", "a,b"), ("T", 7, "Milliseconds", "a")]
    assert str(metrics.store[0]).startswith("Cats.Count:5|#ModelName:kitten,Level:Model|#host")
    emit_metrics(metrics.store)
    assert len(metrics.drain()) == 4
    assert metrics.store == []


def test_a_metric_made_by_itself_reaches_the_next_reply(metrics):
    CachingMetric("Cats", "count").add_or_update(3)
    assert metrics.drain() == [["counter", "Cats", "Count", 3.0, [], []]]


def test_emitting_nothing_or_something_else_does_no_harm(metrics):
    emit_metrics(None)
    emit_metrics({"alive": True})
    assert metrics.drain() == []


def test_dimensions_by_position_as_older_handlers_pass_them(metrics):
    metrics.add_metric("N", 1, "ms", 0, [Dimension("Level", "Host")])
    assert metrics.drain()[0][4] == [["Level", "Host"], ["ModelName", "kitten"]]


def test_the_list_of_dimensions_stays_as_it_was(metrics):
    mine = [Dimension("City", "Graz")]
    metrics.add_counter("N", 1, dimensions=mine)
    assert mine == [Dimension("City", "Graz")]


def test_without_requests_the_level_is_error():
    metrics = MetricsStore(None, "kitten")
    metrics.add_counter("N", 1)
    assert metrics.drain()[0][4:] == [[["ModelName", "kitten"], ["Level", "Error"]], []]


def test_an_error_belongs_to_no_request(metrics):
    metrics.add_error("Bad", 1)
    assert metrics.drain() == [
        ["counter", "Bad", "unit", 1.0, [["ModelName", "kitten"], ["Level", "Error"]], []]
    ]


def test_the_unit_must_measure_what_is_reported(metrics):
    with pytest.raises(MetricsCacheValueError, match="ms, s"):
        metrics.add_time("T", 1, unit="MB")
    with pytest.raises(MetricsCacheValueError, match="MB, kB, GB, B"):
        metrics.add_size("T", 1, unit="ms")


@pytest.mark.parametrize(
    "report",
    [
        lambda m: m.add_counter("N", "twelve"),
        lambda m: m.add_counter("N", None),
        lambda m: m.add_counter("N", [1, 2]),
        lambda m: m.add_counter(12, 1),
        lambda m: m.add_metric("N", 1, "ms", metric_type="gauge"),
    ],
)
def test_wrong_types_raise(metrics, report):
    with pytest.raises(MetricsCacheTypeError):
        report(metrics)
    assert metrics.drain() == []


def test_a_text_may_contain_the_number(metrics):
    metrics.add_time("Decoding", f"{1.25:.1f}")

    [(_, name, _, number, *_)] = metrics.drain()
    assert (name, number) == ("Decoding", 1.2)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 10**400, Fraction(10**400)])
def test_impossible_values_are_logged_and_dropped(metrics, caplog, value):
    metrics.add_counter("N", value)
    assert metrics.drain() == []
    assert [(r.levelno, "N" in r.getMessage()) for r in caplog.records] == [(logging.ERROR, True)]


def test_a_metric_of_ones_own(metrics):
    metric = metrics.add_metric_to_cache("Cats", "count", ["City", "Colour"])
    metric.add_or_update(3, ["Graz", "red"], "a,b")

    assert metrics.get_metric("Cats") is metric
    assert metrics.drain() == [
        ["counter", "Cats", "Count", 3.0, [["City", "Graz"], ["Colour", "red"]], ["a", "b"]]
    ]


def test_dimension_values_must_match_the_names(metrics, caplog):
    metrics.add_metric_to_cache("Cats", "count", ["City"]).add_or_update(3, ["Graz", "red"])
    assert metrics.drain() == []
    assert "['City']" in caplog.text


def test_update_brings_its_own_dimensions(metrics):
    metric = metrics.add_metric_to_cache("Cats", "count", ["City"])
    metric.update(1, "a", [Dimension("Colour", "red")])
    assert metrics.drain()[0][4:] == [[["Colour", "red"]], ["a"]]


def test_a_reported_metric_can_be_fetched_by_name_and_type(metrics):
    metrics.add_time("T", 1)
    assert metrics.get_metric("T", MetricTypes.GAUGE).unit == "Milliseconds"
    with pytest.raises(MetricsCacheKeyError, match="There is no counter 'T'"):
        metrics.get_metric("T")


def test_a_declared_metric_is_there_from_the_first_call_on(caplog):
    metrics = MetricsStore(declared=[["gauge", "Width", "count", ["ModelName"]]])
    metric = metrics.get_metric("Width", MetricTypes.GAUGE)
    metric.add_or_update(4, ["kitten"])
    metrics.add_metric_to_cache("Width", "count", ["ModelName"], MetricTypes.GAUGE)

    assert metrics.drain() == [["gauge", "Width", "Count", 4.0, [["ModelName", "kitten"]], []]]
    assert "Width exists" in caplog.text


def test_what_is_reported_while_the_model_is_loaded_is_of_level_model(metrics):
    metrics.request_ids = "load"
    metrics.add_counter("Starts", 1)
    metrics.add_counter("Starts", 1, 0)
    assert [row[4:] for row in metrics.drain()] == [[DEFAULTS, ["load"]]] * 2


def test_a_metric_kept_by_the_handler_reports_through_copies_of_the_store(metrics):
    kept = metrics.add_metric_to_cache("Cats", "count")
    copied = copy.deepcopy(metrics)
    kept.add_or_update(1)
    assert [row[1] for row in copied.drain()] == ["Cats"]
    assert metrics.drain() == []


def test_replacing_a_metric_warns(metrics, caplog):
    first = metrics.add_metric_to_cache("Cats", "count")
    assert metrics.add_metric_to_cache("Cats", "count") is not first
    assert "Cats exists" in caplog.text


def test_nothing_is_printed(metrics, capfd):
    metrics.add_time("T", 1)
    metrics.drain()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("method", "value"), [("counter", 5), (None, 2)])
def test_the_legacy_metric(method, value):
    metric = Metric("N", 3, "ms", [Dimension("Level", "Model")], "a", method)
    metric.update(2)
    described = metric.to_dict()

    assert metric.value == value
    assert described["MetricName"] == "N"
    assert described["Unit"] == "Milliseconds"
    assert described["Dimensions"] == [{"Name": "Level", "Value": "Model"}]
    metric.reset()
    assert metric.value == 0


def test_metrics_emitted_without_a_context_leave_with_the_next_reply(metrics):
    emit_metrics([Metric("N", 3, "ms", [Dimension("Level", "Model")], "a", "counter")])

    assert metrics.drain() == [["counter", "N", "Milliseconds", 3.0, [["Level", "Model"]], ["a"]]]
    assert metrics.drain() == []


def test_a_dimension_reads_as_in_the_log():
    assert str(Dimension("Level", "Model")) == "Level:Model"
