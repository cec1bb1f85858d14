from marserve.frontend.tracing.worker_history import WorkerHistory


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def play(*changes: tuple[float, int, str]) -> WorkerHistory:
    clock = Clock()
    history = WorkerHistory(clock)
    for clock.now, worker, state in changes:
        history.changed(worker, state)
    return history


def test_the_moment_with_the_fewest_ready_workers_counts():
    history = play(
        (0, 1, "ready"), (0, 2, "ready"), (5, 1, "failed"), (6, 1, "starting"), (8, 1, "ready")
    )
    assert history.fewest_ready(1, 4)[0] == 2
    assert history.fewest_ready(1, 5.5) == (1, {"ready": 1, "failed": 1})
    assert history.fewest_ready(6.5, 20) == (1, {"ready": 1, "starting": 1})
    assert history.fewest_ready(9, 20) == (2, {"ready": 2})


def test_a_stopped_worker_is_not_counted():
    history = play((0, 1, "ready"), (0, 2, "ready"), (5, 1, "stopped"))
    assert history.fewest_ready(6, 7) == (1, {"ready": 1})


def test_a_worker_without_changes_for_long_is_still_known():
    many = [(float(number), 2, ("failed", "ready")[number % 2]) for number in range(1000)]
    history = play((0, 1, "ready"), *many)
    assert history.fewest_ready(999.5, 1000) == (2, {"ready": 2})
    assert 1 not in {change.worker_id for change in history.changes()}


def test_an_error_is_added_to_the_failure():
    history = play((0, 1, "ready"), (1, 1, "failed"))
    history.changed(1, "failed", "no memory")
    changes = [(change.at, change.state, change.error) for change in history.changes()]
    assert changes == [(0, "ready", ""), (1, "failed", "no memory")]
