import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.metrics_config import Declared
from marserve.frontend.telemetry.series import Family, Registry

LIBRARY: dict[str, tuple[type[MetricWrapperBase], str]] = {
    "counter": (Counter, "inc"),
    "gauge": (Gauge, "set"),
    "histogram": (Histogram, "observe"),
}
AMOUNTS = st.integers(0, 20) | st.floats(0, 20) | st.sampled_from([0.005, 0.1, 1, 2.5, 10])
every_kind = pytest.mark.parametrize("kind", LIBRARY)


def family(kind: str = "counter", name: str = "a_metric", *labels: str) -> Family:
    return Registry().add(Declared(kind, name, "", labels or ("who",)))


@every_kind
@given(values=st.lists(AMOUNTS | st.sampled_from([math.inf, math.nan]), min_size=1))
def test_samples_are_those_of_prometheus_client(kind, values):
    made, method = LIBRARY[kind]
    registry = CollectorRegistry()
    metric = made("a_metric", "What it is", ["who"], registry=registry).labels("me")
    ours = family(kind)
    series = ours.join("me")
    for value in values:
        getattr(metric, method)(value)
        series.update(value)
    for suffix, labels, value in ours.samples():
        named = {key: text if isinstance(text, str) else str(text) for key, text in labels}
        named = {key: "+Inf" if text == "inf" else text for key, text in named.items()}
        name = "a_metric_total" if kind == "counter" else f"a_metric{suffix}"
        assert repr(registry.get_sample_value(name, named)) == repr(float(value))


def test_without_a_log_no_updates_are_collected():
    counters = family()
    series = counters.join("me")
    series.update(1)
    series.leave()
    assert not counters.changed


def test_a_counter_never_decreases():
    series = family().join("me")
    series.update(2)
    with pytest.raises(ValueError, match="non-negative"):
        series.update(-1)
    assert series.total == 2


def test_a_series_is_on_the_page_from_its_first_update_until_the_last_user_leaves():
    counters = family()
    first, second = counters.join("me"), counters.join("me")
    assert list(counters.samples()) == []
    first.update(1)
    second.update(1)
    first.leave()
    assert list(counters.samples()) == [("", (("who", "me"),), 2)]
    second.leave()
    assert list(counters.samples()) == []
    first.update(1)
    assert list(counters.samples()) == []
    again = counters.join("me")
    again.show()
    assert list(counters.samples()) == [("", (("who", "me"),), 0)]


@pytest.mark.parametrize(("kind", "news"), [("counter", 5.0), ("gauge", 3.0), ("histogram", 2.5)])
def test_updates_are_taken_once(kind, news):
    metric = family(kind)
    changed = []
    metric.changed = changed
    series = metric.join("me")
    for _ in range(2):
        series.update(2)
        series.update(3)
        assert changed == [series]
        assert series.take() == news
        changed.clear()


@pytest.mark.parametrize("name", ["h", "h_sum", "h_count", "h_bucket"])
def test_names_of_samples_are_unique(name):
    registry = Registry()
    histogram = registry.add(Declared("histogram", "h", "", ()))
    with pytest.raises(ValueError, match="exists already"):
        registry.add(Declared("gauge", name, "", ()))
    registry.discard(histogram)
    registry.discard(histogram)
    registry.add(Declared("gauge", name, "", ()))


@pytest.mark.parametrize(
    ("kind", "label"), [("gauge", "__name"), ("histogram", "le"), ("counter", "a b")]
)
def test_labels_that_prometheus_reserves_are_refused(kind, label):
    with pytest.raises(ValueError, match=label):
        family(kind, "a_metric", label)
