import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics import MetricWrapperBase

from marserve.frontend.telemetry.fast_counters import Update, counting, observing, setting

KINDS: dict[str, tuple[type[MetricWrapperBase], Callable[[Any], Update], str]] = {
    "counter": (Counter, counting, "inc"),
    "gauge": (Gauge, setting, "set"),
    "histogram": (Histogram, observing, "observe"),
}


def page(kind: str, update_of: Callable[[Any], Update], values: list[float]) -> str:
    registry = CollectorRegistry()
    metric = KINDS[kind][0]("a_metric", "What it is", ["who"], registry=registry)
    update = update_of(metric.labels("me"))
    for value in values:
        update(value)
    lines = generate_latest(registry).decode().splitlines()
    return "\n".join(line for line in lines if "_created" not in line)


AMOUNTS = st.integers(0, 20) | st.floats(0, 20) | st.sampled_from([0.005, 0.1, 1, 2.5, 10])


@pytest.mark.parametrize("kind", KINDS)
@given(values=st.lists(AMOUNTS | st.sampled_from([math.inf, math.nan]), min_size=1))
def test_the_page_is_the_one_the_library_would_have_made(kind: str, values: list[float]) -> None:
    _, quick, library = KINDS[kind]
    assert page(kind, quick, values) == page(kind, lambda one: getattr(one, library), values)


def test_a_counter_never_goes_down() -> None:
    count = counting(Counter("a_counter", "What it is", registry=None))
    with pytest.raises(ValueError, match="non-negative"):
        count(-1)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_kept_elsewhere_are_left_to_the_library(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers: list[float] = []

    class Elsewhere:
        def __init__(self, *_args: Any, **_options: Any) -> None: ...

        def inc(self, amount: float) -> None:
            numbers.append(amount)

        def set(self, value: float, timestamp: float | None = None) -> None:
            assert timestamp is None
            numbers.append(value)

    monkeypatch.setattr("prometheus_client.values.ValueClass", Elsewhere)
    made, quick, _ = KINDS[kind]
    quick(made("a_metric", "What it is", registry=None))(3)
    assert 3 in numbers
