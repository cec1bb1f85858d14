"""The time line of runs as operators read it."""

from types import SimpleNamespace

from marserve.frontend.workflows.timeline import NodeTimes, RunTimes
from marserve.frontend.workflows.workflow import Workflow


def test_times_are_milliseconds_since_the_start_of_the_run():
    waiting = NodeTimes("b", queued=90.5)
    done = NodeTimes("a", queued=90.0, attempts=2, started=90.2, ended=90.5, outcome="answered")
    run = RunTimes("id", 90.0, 91.0, "expired", [done, waiting], started_at=1_000_090.0)
    assert run.document() == (
        {
            "id": "id",
            "startedAt": 1_000_090_000,
            "tookMs": 1000.0,
            "outcome": "expired",
            "nodes": [
                {
                    "node": "a",
                    "queuedMs": 0.0,
                    "startedMs": 200.0,
                    "endedMs": 500.0,
                    "attempts": 2,
                    "outcome": "answered",
                },
                {
                    "node": "b",
                    "queuedMs": 500.0,
                    "startedMs": None,
                    "endedMs": None,
                    "attempts": 0,
                    "outcome": "cancelled",
                },
            ],
        }
    )


def test_the_last_hundred_are_kept():
    graph = SimpleNamespace(name="w", specification=None)
    parts = [None, graph, 1, None]
    timeline = Workflow(*parts).timeline
    timeline.extend(RunTimes(str(number), 0.0) for number in range(150))
    assert [run.id for run in timeline] == [str(n) for n in range(50, 150)]
