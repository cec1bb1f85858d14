import pytest
from prometheus_client.parser import text_string_to_metric_families

from marserve.frontend.telemetry.exposition import render
from marserve.frontend.telemetry.metrics_config import Declared
from marserve.frontend.telemetry.series import Family, Registry


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
def registry() -> Registry:
    registry = Registry()
    add(registry, "counter", "Requests2XX", "How many", "Level").join("Host").update(2)
    add(registry, "counter", "ts_requests_total", "How many", "m").join("a").update(1)
    add(registry, "gauge", "Load", "Now", "Level").join("Host").update(0.5)
    return registry


def lines(registry: Registry, *only: str) -> list[str]:
    return render(registry, only).splitlines()


def test_names_stand_as_they_were_declared(registry: Registry) -> None:
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


def test_the_reader_may_ask_for_some_names_only(registry: Registry) -> None:
    assert lines(registry, "Requests2XX", "unknown") == [
        "# HELP Requests2XX How many",
        "# TYPE Requests2XX counter",
        'Requests2XX{Level="Host",} 2.0',
    ]
    assert render(registry, ["unknown"]) == ""


def test_of_a_histogram_single_series_can_be_asked_for() -> None:
    registry = Registry()
    add(registry, "histogram", "h", "H", "m", buckets=(1, 2)).join("a").update(1.5)
    assert 'h_bucket{m="a",le="2.0",} 1.0' in lines(registry)
    assert 'h_bucket{m="a",le="+Inf",} 1.0' in lines(registry)
    assert lines(registry, "h_count") == ["# HELP h H", "# TYPE h histogram", 'h_count{m="a",} 1.0']


def test_texts_are_escaped() -> None:
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
def test_a_name_that_is_taken_or_none_is_refused(name: str, registry: Registry) -> None:
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
def test_numbers_are_written_as_java_does(value: float, text: str) -> None:
    registry = Registry()
    add(registry, "gauge", "g", "G", "m").join("a").update(value)
    assert lines(registry)[-1] == f'g{{m="a",}} {text}'


def test_bounds_of_a_histogram_are_numbers_and_other_labels_are_not() -> None:
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


def test_a_parser_of_prometheus_reads_the_text(registry: Registry) -> None:
    families = text_string_to_metric_families(render(registry))
    read = [
        (each.type, sample.labels, sample.value) for each in families for sample in each.samples
    ]
    assert read == [
        ("counter", {"Level": "Host"}, 2.0),
        ("counter", {"m": "a"}, 1.0),
        ("gauge", {"Level": "Host"}, 0.5),
    ]
