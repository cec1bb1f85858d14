import contextlib
import math
import time
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from steps import page_of, result_of

from marserve.frontend.telemetry.exposition import (
    prefers_openmetrics,
    render_openmetrics,
)
from marserve.frontend.telemetry.metrics_config import Declared
from marserve.frontend.telemetry.series import Family, Registry


def openmetrics_of(registry: Registry, *arguments: Any, **options: Any) -> str:
    return result_of(render_openmetrics(registry, *arguments, **options)).decode()


def add(
    registry: Registry,
    kind: str,
    name: str,
    text: str,
    *labels: str,
    buckets: tuple[float, ...] = (),
) -> Family:
    return registry.add(Declared(kind, name, "", labels, buckets, text))


@pytest.fixture
def registry():
    registry = Registry()
    add(registry, "counter", "Requests2XX", "How many", "Level").join("Host").update(2)
    add(registry, "counter", "ts_requests_total", "How many", "m").join("a").update(1)
    add(registry, "gauge", "Load", "Now", "Level").join("Host").update(0.5)
    return registry


def lines(registry: Registry, *only: str) -> list[str]:
    return page_of(registry, only).splitlines()


def test_names_stand_as_they_were_declared(registry):
    assert lines(registry) == [
        "# HELP Requests2XX How many",
        "# TYPE Requests2XX counter",
        'Requests2XX{Level="Host",} 2.0',
        "# HELP ts_requests_total How many",
        "# TYPE ts_requests_total counter",
        'ts_requests_total{m="a",} 1.0',
        "# HELP Load Now",
        "# TYPE Load gauge",
        'Load{Level="Host",} 0.5',
    ]


def test_the_reader_may_ask_for_some_names_only(registry):
    assert lines(registry, "Requests2XX", "unknown") == [
        "# HELP Requests2XX How many",
        "# TYPE Requests2XX counter",
        'Requests2XX{Level="Host",} 2.0',
    ]
    assert page_of(registry, ["unknown"]) == ""


def test_of_a_histogram_single_series_can_be_asked_for():
    registry = Registry()
    add(registry, "histogram", "h", "H", "m", buckets=(1, 2)).join("a").update(1.5)
    assert 'h_bucket{m="a",le="2.0",} 1.0' in lines(registry)
    assert 'h_bucket{m="a",le="+Inf",} 1.0' in lines(registry)
    assert lines(registry, "h_count") == ["# HELP h H", "# TYPE h histogram", 'h_count{m="a",} 1.0']


def test_texts_are_escaped():
    registry = Registry()
    add(registry, "counter", "c", 'back\\slash\nnew "quoted"', "m").join('a\\b\n"c"').update(1)
    assert '# HELP c back\\\\slash\\nnew "quoted"' in lines(registry)
    assert 'c{m="a\\\\b\\n\\"c\\"",} 1.0' in lines(registry)


@pytest.mark.parametrize(
    "name",
    [
        "Requests2XX",
        "",
        "no name",
    ],
)
def test_a_name_that_is_taken_or_none_is_refused(name, registry):
    with pytest.raises(ValueError):
        add(registry, "counter", name, "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.0"),
        (-0.0, "-0.0"),
        (75, "75.0"),
        (0.001, "0.001"),
        (0.0001, "1.0E-4"),
        (9_999_999, "9999999.0"),
        (12_345_678.5, "1.23456785E7"),
        (-1e7, "-1.0E7"),
        (1e22, "1.0E22"),
        (5e-324, "5.0E-324"),
        (float("inf"), "+Inf"),
        (float("-inf"), "-Inf"),
        (float("nan"), "NaN"),
    ],
)
def test_numbers_are_written_as_java_does(value, text):
    registry = Registry()
    add(registry, "gauge", "g", "G", "m").join("a").update(value)
    assert lines(registry)[-1] == f'g{{m="a",}} {text}'


def test_bounds_of_a_histogram_are_numbers_and_other_labels_are_not():
    registry = Registry()
    add(registry, "histogram", "h", "H", buckets=(0.0001, 1e7)).join().update(2)
    add(registry, "gauge", "g", "G", "le").join("1e7").update(1)
    assert [line.partition(" ")[0] for line in lines(registry) if "le=" in line] == [
        'h_bucket{le="1.0E-4",}',
        'h_bucket{le="1.0E7",}',
        'h_bucket{le="+Inf",}',
        'g{le="1e7",}',
    ]
    assert "h_sum 2.0" in lines(registry)  # a metric without labels has no braces


def test_a_parser_of_prometheus_reads_the_text(registry):
    families = text_string_to_metric_families(page_of(registry))
    read = [
        (each.type, sample.labels, sample.value) for each in families for sample in each.samples
    ]
    assert read == [
        ("counter", {"Level": "Host"}, 2.0),
        ("counter", {"m": "a"}, 1.0),
        ("gauge", {"Level": "Host"}, 0.5),
    ]


# OpenMetrics


class TimeLine(NamedTuple):
    request_id: str
    answered: float
    trace_id: str | None = None


def parsed(text: str) -> dict[str, Metric]:
    return {each.name: each for each in openmetrics(text)}


@pytest.mark.parametrize(
    ("accept", "is_openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", False),
        ("text/html, application/json, */*", False),
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", True),
        # Prometheus 2.42 and 3.1
        (
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;"
            "version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            True,
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
            "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
            True,
        ),
        ("text/plain, application/openmetrics-text;q=0.5", False),
        ("text/plain;q=0.5, application/openmetrics-text;q=0.5", True),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=high", False),
        ("application/openmetrics-text;q=nan", False),
        (";,;q;=,application/openmetrics-text;;q", False),
    ],
)
def test_the_format_is_the_one_that_the_client_prefers(accept, is_openmetrics):
    assert prefers_openmetrics(accept) == is_openmetrics


@given(st.text('aoq;=,. "01e'))
def test_any_header_may_follow(accept):
    assert prefers_openmetrics(f"application/openmetrics-text, {accept}")


def test_names_are_the_same_in_openmetrics(registry):
    add(registry, "histogram", "h", "H", "m", buckets=(0.5, 2)).join("a").update(1.5)
    assert openmetrics_of(registry).splitlines() == [
        "# HELP Requests2XX How many",
        "# TYPE Requests2XX unknown",
        'Requests2XX{Level="Host"} 2.0',
        "# HELP ts_requests How many",
        "# TYPE ts_requests counter",
        'ts_requests_total{m="a"} 1.0',
        "# HELP Load Now",
        "# TYPE Load gauge",
        'Load{Level="Host"} 0.5',
        "# HELP h H",
        "# TYPE h histogram",
        'h_bucket{m="a",le="0.5"} 0.0',
        'h_bucket{m="a",le="2.0"} 1.0',
        'h_bucket{m="a",le="+Inf"} 1.0',
        'h_count{m="a"} 1.0',
        'h_sum{m="a"} 1.5',
        "# EOF",
    ]


def test_each_bucket_has_its_latest_exemplar():
    registry = Registry()
    series = add(registry, "histogram", "h", "H", "m", buckets=(1, 2)).join("a")
    series.update_with(0.2, TimeLine("first", time.monotonic()))
    moment = time.time()
    series.update_with(0.3, TimeLine('"second"', time.monotonic(), "5" * 32))
    series.update(0.4)
    series.update_with(9.0, ("third",))
    (family,) = openmetrics(openmetrics_of(registry))
    buckets = [sample for sample in family.samples if sample.name == "h_bucket"]
    assert [sample.value for sample in buckets] == [3, 3, 4]
    second, none, third = (sample.exemplar for sample in buckets)
    assert none is None
    assert second.labels == {"request_id": '"second"', "trace_id": "5" * 32}
    assert second.value == 0.3
    assert float(second.timestamp) == pytest.approx(moment, abs=1)
    assert (third.labels, third.value, third.timestamp) == ({"request_id": "third"}, 9, None)
    assert "second" not in page_of(registry)
    series.leave()
    series.update_with(0.1, ("late",))
    assert "late" not in openmetrics_of(registry)


def test_a_metric_that_openmetrics_does_not_allow_keeps_its_samples():
    registry = Registry()
    add(registry, "counter", "jobs_total", "Clashes with the next", "m").join("a").update(1)
    add(registry, "gauge", "jobs", "Clashes with the last", "m").join("a").update(2)
    add(registry, "histogram", "h", "Not a number", "m").join("a").update(math.nan)
    add(registry, "histogram", "n", "Negative", "m", buckets=(-1, 1)).join("a").update(-3)
    add(registry, "gauge", "n_created", "An own one", "m").join("a").update(1)
    for who in "ab":
        registry.add(Declared("histogram", f"of_{who}", "", ("m",), (-0.5,))).join(who).update(1)
    families = parsed(openmetrics_of(registry))
    assert {family.type for family in families.values()} == {"unknown", "gauge"}
    shown = {sample.name for family in families.values() for sample in family.samples}
    plain = {line.partition("{")[0] for line in lines(registry) if line[0] != "#"}
    assert shown == plain


def test_of_asked_names_and_relayed_samples_the_type_is_unknown(registry):
    histogram = add(registry, "histogram", "h", "H", "m", buckets=(1,))
    for who in "ab":
        histogram.join(who).update(0.5)
    relayed = ['e:x{w="1"} 1.0\n', 'e:y{w="1"} 2\n', 'e:x{w="2"} NaN\n']
    text = openmetrics_of(registry, ["h_sum", "h_count", "Load"], relayed=relayed)
    families = parsed(text)
    assert {name: (family.type, len(family.samples)) for name, family in families.items()} == {
        "Load": ("unknown", 1),
        "h_count": ("unknown", 2),
        "h_sum": ("unknown", 2),
        "e:x": ("unknown", 2),
        "e:y": ("unknown", 1),
    }
    assert openmetrics_of(registry, ["none"]) == "# EOF\n"


@given(
    kind=st.sampled_from(["counter", "gauge", "histogram"]),
    name=st.sampled_from(["a", "a_total", "a_created", "a_count", "a_created_total"]),
    other=st.sampled_from(["a", "a_total", "a_created", "b"]),
    text=st.text(),
    values=st.lists(st.floats(min_value=0) | st.sampled_from([math.nan, math.inf]), max_size=3),
    buckets=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=3),
)
def test_the_parser_of_openmetrics_reads_what_the_other_page_has(
    kind, name, other, text, values, buckets
):
    registry = Registry()
    bounds = tuple(sorted(set(buckets)))
    series = add(registry, kind, name, text, "m", buckets=bounds).join(text)
    with contextlib.suppress(ValueError):  # the name is taken
        add(registry, "counter", other, text, "m").join(text).update(1)
    for value in values:
        series.update(value)
    plain = [line for line in page_of(registry).split("\n") if line and line[0] != "#"]
    families = openmetrics(openmetrics_of(registry))
    assert sorted(
        (sample.name, str(float(sample.value)), sample.labels["m"])
        for family in families
        for sample in family.samples
    ) == sorted(
        (line.partition("{")[0], str(float(line.rpartition(" ")[2])), text) for line in plain
    )
