"""The states of a worker, and their names in the log."""

from enum import Enum


class WorkerState(Enum):
    """The states of a worker.

    STARTING -> LOADING -> READY -> STOPPED
        any of these    -> FAILED -> STARTING   (after the back-off)
                                  -> STOPPED    (the retry window is over)
    """

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

#: TorchServe's names, for which operators search the log.
LOG_NAMES = {
    WorkerState.STARTING: "WORKER_STARTED",
    WorkerState.LOADING: "WORKER_STARTED",
    WorkerState.READY: "WORKER_MODEL_LOADED",
    WorkerState.FAILED: "WORKER_STOPPED",
    WorkerState.STOPPED: "WORKER_STOPPED",
}
#: The name of a worker in the log, just after it has reported why its model cannot be loaded.
LOAD_FAILED = "WORKER_ERROR"
