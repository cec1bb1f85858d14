import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from marserve.backend.context import Context
from marserve.backend.metrics import MetricsStore
from marserve.backend.profiling.measurements import Measurements
from marserve.backend.protocol import Input, Load, Part, Predict, Profile
from marserve.backend.service import Service

TICK = 0.01


class Profiled:
    """A handler that notes its batches; each takes a tick of the clock."""

    def __init__(self, directory: Path, sample: Any, failing_at: int) -> None:
        self.runs: list[int] = []
        self._failing_at = failing_at
        context = Context("m", str(directory), None, 4, None, "1", metrics=MetricsStore())
        self.service = Service(
            self._handle, context, owner=SimpleNamespace(sample_input=lambda: sample)
        )
        load = Load("m", str(directory), "h", 4, None, True, 1000, "1")
        ticks = itertools.count()
        measurements = Measurements(load, self.service, lambda: TICK * next(ticks))
        self.run = measurements.run_once

    def _handle(self, data: list[Any], _context: Context) -> list[str]:
        self.runs.append(len(data))
        if len(data) == self._failing_at:
            raise ValueError("too many")
        return ["x"] * len(data)

    def begin(self, *sizes: int, seconds: float = 9.0, longest: float = 9.0) -> Any:
        return self.run(Profile(list(sizes), seconds, longest))

    def go_on(self, times: int) -> Any:
        for _ in range(times):
            reply = self.run(Profile([], 0.0, 0.0))
        return reply


@pytest.fixture
def make_profiled(tmp_path):
    def make(sample="a sample", failing_at=0):
        return Profiled(tmp_path, sample, failing_at)

    return make


def test_each_message_is_one_run(make_profiled):
    profiled = make_profiled()
    assert profiled.begin(1, 2).costs == []
    assert profiled.runs == [1]
    reply = profiled.go_on(4)
    assert profiled.runs == [1, 1, 1, 1, 2]
    assert reply.costs[0][:2] == (1, pytest.approx(TICK))
    reply = profiled.go_on(4)
    assert [row[0] for row in reply.costs] == [1, 2]
    assert profiled.runs == [1] * 4 + [2] * 4
    assert reply.note == ""
    assert profiled.go_on(1).costs == reply.costs


def test_requests_are_answered_in_between(make_profiled):
    profiled = make_profiled()
    profiled.begin(1, 2)
    request = Input("id", {}, [Part("data", "", b"1")])
    assert profiled.service.predict(Predict([request] * 3)).code == 200
    profiled.go_on(8)
    assert profiled.runs == [1, 3, 1, 1, 1, 2, 2, 2, 2]


def test_it_begins_anew(make_profiled):
    profiled = make_profiled()
    profiled.begin(1, 2)
    profiled.go_on(5)
    assert profiled.begin(2).costs == []
    assert [row[0] for row in profiled.go_on(4).costs] == [2]


def test_no_batch_is_run_that_takes_too_long(make_profiled):
    profiled = make_profiled()
    profiled.begin(1, 4, longest=2 * TICK)
    reply = profiled.go_on(4)
    assert profiled.runs == [1] * 4
    assert "size 4 would take about 0.04 s" in reply.note


@pytest.mark.parametrize(
    ("sample", "failing_at", "words"),
    [
        (None, 0, "there is no sample input"),
        (object(), 0, "sample_input failed"),
        ("a sample", 1, "size 1 failed with status"),
    ],
)
def test_what_cannot_be_run_is_told(make_profiled, sample, failing_at, words):
    reply = make_profiled(sample, failing_at).begin(1, 2)
    assert words in reply.note
    assert reply.costs == []
