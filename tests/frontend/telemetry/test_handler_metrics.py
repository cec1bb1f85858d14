from typing import Any

import pytest

from marserve.frontend.telemetry.exposition import Registry, render
from marserve.frontend.telemetry.handler_metrics import HandlerMetrics

DIMENSIONS = [["ModelName", "kitten"], ["Level", "Model"]]


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def metrics(registry: Registry) -> HandlerMetrics:
    return HandlerMetrics(registry, "host")


def row(kind: str, name: str, value: Any, dimensions: Any = DIMENSIONS) -> list[Any]:
    return [kind, name, "ms", value, dimensions, "request-id"]


def samples(registry: Registry, name: str) -> list[str]:
    return [line for line in render(registry).splitlines() if line.startswith(name)]


@pytest.mark.parametrize(("kind", "total"), [("counter", "5.0"), ("gauge", "3.0")])
def test_a_row_becomes_a_metric_when_it_is_first_seen(
    kind: str, total: str, registry: Registry, metrics: HandlerMetrics
) -> None:
    metrics.record([row(kind, "Cats", 2), row(kind, "Cats", 3)])
    labels = 'ModelName="kitten",Level="Model",Hostname="host"'
    assert samples(registry, "Cats") == [f"Cats{{{labels}}} {total}"]
    assert f"# TYPE Cats {kind}" in render(registry)
    assert "metric with unit: ms" in render(registry)


def test_a_histogram_is_observed(registry: Registry, metrics: HandlerMetrics) -> None:
    metrics.record([row("histogram", "Cats", 2), row("histogram", "Cats", 3)])
    assert samples(registry, "Cats_sum")[0].endswith(" 5.0")


def test_each_value_of_a_dimension_is_a_series_whatever_their_order(
    registry: Registry, metrics: HandlerMetrics
) -> None:
    metrics.record(
        [
            row("counter", "Cats", 1),
            row("counter", "Cats", 1, [["ModelName", "lion"], ["Level", "Model"]]),
            row("counter", "Cats", 1, [["Level", "Model"], ["ModelName", "lion"]]),
        ]
    )
    assert [line.rpartition(" ")[2] for line in samples(registry, "Cats")] == ["1.0", "2.0"]


@pytest.mark.parametrize(
    "bad",
    [
        row("counter", "no name", 1),
        row("counter", "Dogs", -1),
        row("counter", "Dogs", "many"),
        row("summary", "Dogs", 1),
        row("gauge", "Cats", 1),
        row("counter", "Cats", 1, [["Other", "x"]]),
        row("counter", "Dogs", 1, [["no label", "x"]]),
        row("counter", "Dogs", 1, 7),
        ["counter"],
        [],
        None,
    ],
    ids=repr,
)
def test_a_row_that_cannot_be_kept_is_told_once_and_harms_no_other(
    bad: Any, registry: Registry, metrics: HandlerMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    good = row("counter", "Cats", 1)
    metrics.record([good, bad, good])
    metrics.record([bad])
    assert samples(registry, "Cats{")[0].endswith(" 2.0")
    assert len(caplog.records) == 1
