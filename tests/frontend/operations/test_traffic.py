from types import SimpleNamespace
from typing import Any

import pytest

from marserve.frontend.operations.traffic import TrafficHistory, quantile
from marserve.frontend.telemetry.metrics import SECONDS, Metrics
from marserve.frontend.telemetry.model_metrics import ModelMetrics


class Play:
    """A model whose requests are counted, in virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        metrics = ModelMetrics(Metrics("host"), "m", "1.0")

        class Model(SimpleNamespace):
            __hash__ = object.__hash__

        self.model: Any = Model(metrics=metrics)
        self.history = TrafficHistory([self.model], lambda: self.now)

    def serve(self, seconds: float, per_second: int, took: float = 0.015) -> None:
        for _ in range(round(seconds / 5)):
            self.history.sample()
            for _ in range(5 * per_second):
                self.model.metrics.unversioned.answered(0.0, took, ("id",))
            self.now += 5.0


def test_rates_are_those_of_steps_of_five_seconds():
    play = Play()
    play.serve(20, 10)
    play.serve(10, 40)
    found = play.history.of(play.model)
    assert found.rates == [10.0, 10.0, 10.0, 10.0, 40.0]
    assert found.per_second == 40.0
    assert found.answered == 20 * 10 + 10 * 40


def test_percentiles_and_failures_are_of_the_last_minute():
    play = Play()
    play.model.metrics.rejected("queue_full")
    play.serve(60, 2, took=4.0)
    play.serve(5, 2)
    play.model.metrics.request_failed("handler")
    play.serve(55, 2)
    found = play.history.of(play.model)
    assert found.answered == 120
    assert all(0.01 <= each <= 0.02 for each in found.percentiles)
    assert found.errors == {"handler": 1}


def test_a_model_without_requests_has_no_percentiles():
    play = Play()
    assert play.history.of(play.model) == (0, 0.0, [], (), {})
    play.serve(10, 0)
    assert play.history.of(play.model).percentiles == ()


def test_a_new_model_is_counted_before_its_first_sample():
    play = Play()
    play.model.metrics.request_failed("handler")
    play.model.metrics.unversioned.answered(0.0, 0.015, ("id",))
    found = play.history.of(play.model)
    assert (found.answered, found.per_second, found.errors) == (1, 0.2, {"handler": 1})


def test_five_minutes_are_kept():
    play = Play()
    play.serve(1000, 1)
    assert len(play.history.of(play.model).rates) == 60


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 0.01), (0.25, 0.0075), (0.75, 0.015), (1.0, 0.02)]
)
def test_a_quantile_is_interpolated_in_its_bucket(share, expected):
    counts = [0] * (len(SECONDS) + 1)
    counts[SECONDS.index(0.01)] = counts[SECONDS.index(0.02)] = 10
    assert quantile(counts, share) == pytest.approx(expected)


def test_above_all_bounds_the_quantile_is_the_last_one():
    assert quantile([0] * len(SECONDS) + [3], 0.99) == SECONDS[-1]
