"""The time line of runs as operators read it."""

from marserve.frontend.workflows.timeline import NodeTimes, RunTimes, Timeline


def test_times_are_milliseconds_since_the_start_of_the_run() -> None:
    timeline = Timeline(clock=lambda: 100.0, wall_clock=lambda: 1_000_100.0)
    waiting = NodeTimes("b", queued=90.5)
    done = NodeTimes("a", queued=90.0, attempts=2, started=90.2, ended=90.5, outcome="answered")
    timeline.add(RunTimes("id", 90.0, 91.0, "expired", [done, waiting]))
    assert timeline.as_documents() == [
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
    ]


def test_the_last_hundred_are_kept() -> None:
    timeline = Timeline()
    for number in range(150):
        timeline.add(RunTimes(str(number), 0.0))
    assert [run["id"] for run in timeline.as_documents()] == [str(n) for n in range(50, 150)]
