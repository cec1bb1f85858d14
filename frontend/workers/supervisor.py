"""The supervisor of one worker: start, load, serve, restart with back-off, drain, stop.

It has one task, which owns the process and the connection. Batches do not pass through it
(`workers.dispatch`).

Failures are of three kinds. A failure that the worker *reports* (a reply with a code) fails the
batch, and the worker goes on. A worker that cannot reply any more (`ConnectionLost`) is replaced,
and its requests are retried. One that replies that it can serve no more (`Poisoned`) is replaced.
If a model cannot be loaded for a permanent reason (a mistake in the handler's code), loading is not
tried again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from marserve.backend.protocol import (
    Load,
    Loaded,
    LoadFailure,
    Profiled,
    SetThreads,
    ThreadsSet,
    Trials,
)
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.dispatch.batched import DispatchStrategy
from marserve.frontend.workers.failures import (
    Backoff,
    ConnectionLost,
    Diagnostics,
    Failure,
    FailureHistory,
    LoadFailed,
    Poisoned,
    StartTimedOut,
    may_be_profiling,
)
from marserve.frontend.workers.launchers.launcher import Launcher, WorkerProcess, WorkerSpec
from marserve.frontend.workers.launchers.openmp import TorchOptions
from marserve.frontend.workers.process_lifecycle import fail_later, find_cause, start_in_time

MakeDispatch = Callable[[WorkerConnection, Batcher, ModelMetrics], DispatchStrategy]

logger = logging.getLogger(__name__)

#: What the process of a worker may take until it begins to load, as in TorchServe; more where
#: `WorkerTimeouts.startup` is more.
START_SECONDS = 120.0
# The least that is left of it once there is a process, whose first message may be here, unread.
_LEAST_START_SECONDS = 1.0
# How long an idle worker may take to end after its connection was closed, and then after SIGTERM.
_LEAVE_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerTimeouts:
    """Seconds that a worker may take to load, and the window of `Backoff`."""

    startup: float
    retry_window: float


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


class WorkerSupervisor:
    """Starts, watches and restarts one worker.

    ``worker_id`` is the number that describe shows, TorchServe's "port"; ``make_dispatch`` makes
    what serves once the worker is READY.

    Attributes:
        started_at: Wall-clock time of the latest start of its process, seconds since the epoch.
        pid: Process id; None while there is no process.
    """

    def __init__(
        self,
        worker_id: int,
        spec: WorkerSpec,
        load: Load,
        timeouts: WorkerTimeouts,
        make_dispatch: MakeDispatch,
        batcher: Batcher,
        launcher: Launcher,
        metrics: ModelMetrics,
        threads_found: tuple[int, str] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.gpu_id = load.gpu_id
        self.state = WorkerState.STARTING
        self.started_at = time.time()
        self.pid: int | None = None
        self._spec = spec
        self._load = load
        self._timeouts = timeouts
        self._start_seconds = max(START_SECONDS, timeouts.startup)
        self._make_dispatch = make_dispatch
        self.batcher = batcher
        self._launcher = launcher
        self._metrics = metrics
        #: As in TorchServe, the worker is named where others name their thread.
        self._log = logging.LoggerAdapter(logger, {"worker": spec.name})
        self._log_word = LOG_WORDS[self.state]
        self._backoff = Backoff(timeouts.retry_window)
        self._history = FailureHistory(spec.name, self._log)
        self._diagnostics = Diagnostics()
        #: Those that the handler declares, as the last load found.
        self.declared_tensors: dict[str, Any] = {}
        self.compiled: dict[str, Any] = {}
        #: What torch was started with; how many threads it has in fact, and why if not these.
        self.torch = spec.torch
        self.threads_in_use = threads_found or (0, "")
        #: How many of them the process was given, by us or by its own trying.
        self._given_threads = 0
        #: What a worker has found by trying, this one or one before it; None while none has.
        self.threads_found = threads_found
        self.dispatch: DispatchStrategy | None = None
        #: Seconds for which a worker that is stopped may leave by itself: none while it is busy.
        self._grace = 0.0
        #: Whether it is to end when it has answered what it has in hand; whether it is to end now.
        self._draining = False
        self._stopping = False
        self._died_over_requests = False
        #: Whether its loads may try out sizes of batches: not again where that was its end.
        self._may_profile = True
        self._task: asyncio.Task[None] | None = None
        self._on_load: Callable[[], object] = lambda: None
        loop = asyncio.get_running_loop()
        self._first_outcome: asyncio.Future[Exception | None] = loop.create_future()

    def start(
        self, on_stopped: Callable[[], None], on_load: Callable[[], object] = lambda: None
    ) -> None:
        """Begin its life.

        ``on_stopped`` is called when that is over for good, ``on_load`` when the model is loaded,
        and when the worker has failed.
        """
        self._on_load = on_load
        self._task = asyncio.create_task(self._run(), name=self._spec.name)
        # A callback of the task, not its last lines: a task cancelled early has no lines.
        self._task.add_done_callback(partial(self._on_stopped, on_stopped))

    async def first_outcome(self) -> Exception | None:
        """Wait for the first load to end: None when it is READY, else why not.

        The deadline is the startup timeout that rules the load itself.
        """
        return await asyncio.shield(self._first_outcome)

    @property
    def is_ready(self) -> bool:
        """Whether it can take a batch."""
        return self.state is WorkerState.READY

    @property
    def can_answer(self) -> bool:
        """Whether it is READY, or is replaced after it was and may be expected to be so again."""
        is_ended = self.is_stopped or self._draining
        return self.is_ready or (self._history.has_loaded and not is_ended)

    @property
    def is_busy(self) -> bool:
        """Whether it has requests in flight."""
        return self.dispatch is not None and self.dispatch.is_busy

    @property
    def room(self) -> int:
        """See `DispatchStrategy.room`."""
        return self.dispatch.room if self.dispatch is not None else 0

    def to_saturate(self, size: int) -> int:
        """See `DispatchStrategy.to_saturate`; none while it does not serve."""
        return self.dispatch.to_saturate(size) if self.dispatch is not None else 0

    @property
    def takes_interrupts(self) -> bool:
        """Whether Ctrl-C is left to its handler, since it runs and shares the terminal."""
        return self._spec.terminal and self.state in (WorkerState.LOADING, WorkerState.READY)

    @property
    def is_stopped(self) -> bool:
        """Whether it has ended for good."""
        return self.state is WorkerState.STOPPED

    @property
    def is_healthy(self) -> bool:
        """TorchServe's health: never failed, or failing for less than the retry window."""
        return not self.is_stopped and not self._backoff.given_up(time.monotonic())

    @property
    def last_failure(self) -> Failure | None:
        """See `FailureHistory.last`."""
        if self.dispatch is not None and self.dispatch.connection.has_answered:
            self._history.last = None
        return self._history.last

    @property
    def cannot_load(self) -> bool:
        """See `FailureHistory.cannot_load`."""
        return self._history.cannot_load

    async def stop(self, drain: float) -> None:
        """Stop it; batches in flight may finish for ``drain`` seconds. Safe to call twice."""
        if self._task is None:
            return
        self._draining = True
        if self.dispatch is not None:
            self.dispatch.finish()
        if self.dispatch is not None and self.dispatch.is_busy and drain > 0:
            ends: set[asyncio.Future[None]] = {self.dispatch.drained, self._task}
            await asyncio.wait(ends, timeout=drain, return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping:  # a second cancellation would interrupt the first one's tidying up
            self._stopping = True
            self._task.cancel()
        await asyncio.wait({self._task})  # no deadline: it kills what does not leave in time

    async def _run(self) -> None:
        while True:
            try:
                await self._run_process()
            except Exception as error:  # noqa: BLE001 - whatever it was, a worker's life goes on
                delay = self._on_failure(error)
            if delay is None or self._draining:
                break
            await asyncio.sleep(delay)

    def _on_stopped(self, on_stopped: Callable[[], None], task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("The supervisor has failed: %s", error, exc_info=error)
        self._set_state(WorkerState.STOPPED)
        failure = self._history.last
        self._set_outcome(ConnectionLost(failure.reason if failure else "the worker was stopped"))
        self._metrics.worker_gone(self._spec.name)
        on_stopped()

    async def _run_process(self) -> NoReturn:
        """Run one process from start to end; raises the reason, once it has ended."""
        self._set_state(WorkerState.STARTING)
        self.started_at = time.time()
        began = time.monotonic()
        self._given_threads = self._spec.threads
        process = await start_in_time(self._launcher, self._spec, self._start_seconds)
        self.pid = process.pid
        close = process.sock.close
        grace = 0.0
        try:
            connection = await WorkerConnection.from_socket(
                process.sock, max_response_bytes=self._load.max_response_bytes
            )
            close = connection.close
            process.on_exit(partial(fail_later, connection))
            if self._draining:
                raise asyncio.CancelledError  # noqa: TRY301 - told to stop while it started
            await self._load_model(connection, process, began + self._start_seconds)
            self._metrics.worker_loaded(self._spec.name, time.monotonic() - began)
            await self._serve(connection, process)
        except asyncio.CancelledError:
            grace = self._grace
            raise
        finally:
            try:
                status = await process.stop(grace, close)
                logger.debug("%s ended with status %s.", self._spec.name, status)
            finally:
                self._diagnostics = process.diagnostics
                self.pid = None

    async def _load_model(
        self, connection: WorkerConnection, process: WorkerProcess, start_by: float
    ) -> None:
        self._set_state(WorkerState.LOADING)
        trials = self._trials()
        # The present batch size, which may have been changed since this worker was made.
        load = replace(self._load, batch_size=self.batcher.batching.max_size, trials=trials)
        # A debugged handler may stop at a breakpoint in its initialize().
        timeout = None if self._spec.terminal else self._timeouts.startup
        try:
            left = max(_LEAST_START_SECONDS, start_by - time.monotonic())
            loaded = await connection.load(load, timeout, left)
        except StartTimedOut:
            raise StartTimedOut(self._start_seconds) from None
        except ConnectionLost as loss:
            loss.cause = await find_cause(loss, process, "startupTimeout", timeout)
            is_needed = trials.must_validate or not trials.validated_sizes
            if trials.sizes or trials.threads or not is_needed:
                self._may_profile = False
                loss.may_be_profiling = True
                loss.cause = f"{loss.cause} It loaded, or tried out batches.".strip()
            raise
        if isinstance(loaded, LoadFailure):
            permanent = loaded.permanent and not _is_being_edited(self._spec)
            raise LoadFailed(loaded.code, loaded.message, permanent=permanent)
        if connection.lost.done():  # since it has replied: it is to get no batch
            end = connection.lost.result()
            end.cause = await find_cause(end, process, "startupTimeout", timeout)
            raise end
        self._learn_costs(loaded.profiled)
        self._note_validation(loaded.validation or self._lost_validation(trials))
        self.declared_tensors = loaded.tensors
        self.compiled = loaded.compiled
        self._learn_threads(loaded)
        self._metrics.reported(loaded.metrics)
        self._set_state(WorkerState.READY)
        self._backoff.succeeded()
        self._history.loaded()
        self._set_outcome(None)
        self._on_load()

    def _trials(self) -> Trials:
        """Return the trials whose results are not known, by an earlier load or by requests."""
        trials, may_profile = self._load.trials, self._may_profile
        if self.batcher.costs.is_known or not may_profile:
            trials = replace(trials, sizes=[])
        if self.threads_found is not None or not may_profile:
            trials = replace(trials, threads=[])
        if self.batcher.validation or not (may_profile or trials.must_validate):
            trials = replace(trials, validated_sizes=[])
        return trials

    def _learn_threads(self, loaded: Loaded) -> None:
        """Keep how many threads torch has; the result of a trial holds for the next process."""
        if loaded.threads_why:
            self.threads_found = (loaded.threads, loaded.threads_why)
            self._spec = replace(self._spec, threads=loaded.threads)
            self._given_threads = loaded.threads
        self._threads_set(ThreadsSet(loaded.threads))

    def _threads_set(self, answer: ThreadsSet) -> None:
        threads = answer.count
        found, why_found = self.threads_found or (0, "")
        self.threads_in_use = (threads, why_found if threads == found else "")

    def share_out(self, torch: TorchOptions, tried: list[int]) -> None:
        """Have another share of the cores, which are divided among another number of workers.

        ``tried`` are the numbers of threads to try when it is started again. What was found by
        trying counts on where fewer threads than the share did; else it is the share, untried.
        """
        if not (torch.is_share and self.torch.is_share) or torch.threads == self.torch.threads:
            return
        count, found = torch.threads, self.threads_found
        if found is not None and found[0] < self.torch.threads:
            count = min(count, found[0])
            self.threads_found = (count, found[1])
        else:
            self.threads_found = None
        self.torch = torch
        self._spec = replace(self._spec, threads=count, torch=torch)
        self._load = replace(self._load, trials=replace(self._load.trials, threads=tried))
        self._agree_on_threads()

    def _agree_on_threads(self) -> None:
        """Tell the process that runs how many threads to compute with, where that has changed.

        One whose batches follow no order, or overlap, has other threads that compute: it keeps what
        it has until it is started again.
        """
        dispatch, count = self.dispatch, self._spec.threads
        if dispatch is None or count == self._given_threads or not self.torch.is_share:
            return
        # Without torch there is nothing to tell; and a handler that has set them decides.
        if self.threads_in_use[0] != self._given_threads or self._load.asynchronous:
            return
        connection = dispatch.connection
        if connection.lost.done() or connection.overlaps:
            return
        change = SetThreads(self._given_threads, count)
        self._given_threads = count
        connection.set_threads(change, dispatch.timeout, self._threads_set)

    def _learn_costs(self, profiled: Profiled) -> None:
        """Use the costs that the worker measured when it profiled batch sizes."""
        costs = profiled.costs
        if costs:
            self.batcher.seed((cost.size, cost.seconds) for cost in costs)
        if profiled.too_large:
            self.batcher.out_of_memory(profiled.too_large, costs[-1].size if costs else 1)
        choice = self.batcher.learning.choice
        if costs and choice is not None:
            logger.info("%s: batches of up to %d: %s.", self._spec.name, choice.size, choice.why)

    def _lost_validation(self, trials: Trials) -> Mapping[str, Any]:
        """Return the result of a validation in which a worker was lost; empty without one."""
        is_asked_for = self._load.trials.validated_sizes
        if self.batcher.validation or not is_asked_for or trials.validated_sizes:
            return {}
        failure = "nothing was compared, since a worker was lost while it tried out batches"
        nothing: list[int] = []
        return {
            "samples": 0,
            "sizes": nothing,
            "largest": 0.0,
            "tolerance": trials.tolerance,
            "failure": failure,
        }

    def _note_validation(self, found: Mapping[str, Any]) -> None:
        """Keep what comparing batches has found; whoever must pass has not come here otherwise."""
        if not found:
            return
        self.batcher.validation = found
        if failure := found["failure"]:
            self._log.warning("%s: validateBatching: %s.", self._spec.name, failure)

    async def _serve(self, connection: WorkerConnection, process: WorkerProcess) -> NoReturn:
        """Let it serve until it is lost; there is no deadline to serving well.

        Raises ConnectionLost when what it had in hand has been answered.
        """
        dispatch = self.dispatch = self._make_dispatch(connection, self.batcher, self._metrics)
        # At once, not when this task wakes: a batch handed over in between would be lost with it.
        connection.on_lost = dispatch.stop_accepting
        dispatch.start()
        self._agree_on_threads()
        cause = "It was stopped."
        try:
            loss = await asyncio.shield(connection.lost)
            # Before its cause is known and its process has ended, which may take seconds.
            self._log.warning("%s Worker disconnected. %s", self._spec.name, LOG_WORDS[self.state])
            self._set_state(WorkerState.FAILED)
            loss.cause = await find_cause(loss, process, "responseTimeout", dispatch.timeout)
            cause = loss.cause or str(loss)
            # Before the clients know: they may ask for it.
            self._history.last = Failure.of(loss, Diagnostics())
            raise loss
        finally:
            self._grace = 0.0 if dispatch.is_busy else _LEAVE_SECONDS
            self._died_over_requests = dispatch.is_busy
            if connection.has_answered:
                self._history.answered()
                if not isinstance(connection.failure, Poisoned):
                    self._backoff.answered()  # an answer that says so is none
            dispatch.on_connection_lost(cause)
            self.dispatch = None

    def _on_failure(self, error: Exception) -> float | None:
        """Record a failure; returns the seconds until the next try, None for no more tries."""
        was_ready = self.state is WorkerState.FAILED  # see `_serve`
        self._history.failed(error, self._diagnostics, was_ready=was_ready)
        self._diagnostics = Diagnostics()
        if isinstance(error, LoadFailed):
            self._log_change(LOAD_FAILED)
        self._set_state(WorkerState.FAILED)
        self._metrics.worker_failures.update(1)
        self._history.recovering()
        if not may_be_profiling(error):  # the model is not blamed for what a sample did
            self._set_outcome(error)
        self._on_load()
        if isinstance(error, LoadFailed) and error.permanent:
            self._log.error("Worker %d is given up: another try would not help.", self.worker_id)
            return None
        over_requests = was_ready and self._died_over_requests
        delay = self._backoff.failed(time.monotonic(), over_requests=over_requests)
        if delay is None:
            self._log.error("Worker %d is given up: its retry window is over.", self.worker_id)
        else:
            self._log.info("Retry worker: %d in %d seconds.", self.worker_id, delay)
        return delay

    def _set_outcome(self, outcome: Exception | None) -> None:
        if not self._first_outcome.done():
            self._first_outcome.set_result(outcome)

    def _set_state(self, state: WorkerState) -> None:
        if state is self.state:
            return
        assert state in TRANSITIONS[self.state], (self.state, state)
        self._log_change(LOG_WORDS[state])
        self.state = state

    def _log_change(self, word: str) -> None:
        if word != self._log_word:
            self._log.info("%s State change %s -> %s", self._spec.name, self._log_word, word)
            self._log_word = word


def _is_being_edited(spec: WorkerSpec) -> bool:
    """Whether somebody may mend the code before the next try: who works in a linked directory."""
    return Path(spec.model_dir).is_symlink()
