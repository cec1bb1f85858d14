"""Where a worker is in its life, and what may come next.

STARTING -> LOADING -> READY -> STOPPED
    any of these    -> FAILED -> STARTING   (after the back-off)
                              -> STOPPED    (the retry window is over)
"""

from enum import Enum


class WorkerState(Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.LOADING, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.LOADING: frozenset({WorkerState.READY, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.READY: frozenset({WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.FAILED: frozenset({WorkerState.STARTING, WorkerState.STOPPED}),
    WorkerState.STOPPED: frozenset(),
}

#: TorchServe's words, as operators grep them in the log.
LOG_WORDS = {
    WorkerState.STARTING: "WORKER_STARTED",
    WorkerState.LOADING: "WORKER_STARTED",
    WorkerState.READY: "WORKER_MODEL_LOADED",
    WorkerState.FAILED: "WORKER_STOPPED",
    WorkerState.STOPPED: "WORKER_STOPPED",
}
#: What the log calls a worker for a moment that has reported why its model cannot be loaded.
LOAD_FAILED = "WORKER_ERROR"
