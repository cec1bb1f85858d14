"""The supervisor of one worker: start, load, serve, restart with back-off, drain, stop.

It has one task, which owns the process and the connection. Batches do not pass through it.

A failure that the worker *reports* (a reply with a code) fails the batch, and the worker continues.
A worker that cannot reply (`ConnectionLost`) is replaced, and its requests are retried. A worker
that replies that it cannot serve (`Poisoned`) is replaced. A model that cannot be loaded for a
permanent reason (a mistake in the handler's code) is not loaded again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from marserve.backend.protocol import Load, LoadFailure
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.telemetry.model_metrics import ModelMetrics
from marserve.frontend.tracing.worker_history import WorkerHistory
from marserve.frontend.workers.batch_validation import BatchValidation
from marserve.frontend.workers.connection import WorkerConnection
from marserve.frontend.workers.dispatch.batched import DispatchStrategy
from marserve.frontend.workers.failures import (
    Backoff,
    ConnectionLost,
    Diagnostics,
    Disconnected,
    Failure,
    FailureHistory,
    LoadFailed,
    Poisoned,
    StartTimedOut,
)
from marserve.frontend.workers.launchers.local import LocalLauncher
from marserve.frontend.workers.launchers.local_process import (
    LocalProcess,
    WorkerSpec,
    find_cause,
)
from marserve.frontend.workers.launchers.openmp import TorchOptions
from marserve.frontend.workers.load_results import LoadResults
from marserve.frontend.workers.worker_state import LOAD_FAILED, LOG_NAMES, TRANSITIONS, WorkerState
from marserve.frontend.workers.worker_threads import WorkerThreads

MakeDispatch = Callable[[WorkerConnection, Batcher, ModelMetrics], DispatchStrategy]

logger = logging.getLogger(__name__)

#: The time limit from the start of a process to the beginning of its load, as in TorchServe;
#: that of the load if it is longer.
START_SECONDS = 120.0
# The rest of it that remains at least when the process is there: its first message may be unread.
_LEAST_START_SECONDS = 1.0
# The time for the last reply to be read from the socket, after the end of the process.
_LAST_REPLY_SECONDS = 0.5
# The time for an idle worker to end after its connection was closed, and again after SIGTERM.
_LEAVE_SECONDS = 2.0


class WorkerSupervisor:
    """Starts, watches and restarts one worker.

    ``worker_id`` is TorchServe's "port". A load may take ``startup_timeout`` seconds;
    ``retry_window`` is that of `Backoff`; ``restore`` runs before each start. The workers of a
    model version share ``validation`` (`LoadResults`).

    Attributes:
        dispatch: None while it does not serve.
        gpu_id: The number of its GPU on this machine; None on the CPU.
        pid: None while there is no process.
        started_at: Wall-clock time of the latest start of its process, seconds since the epoch.
    """

    def __init__(
        self,
        worker_id: int,
        spec: WorkerSpec,
        load: Load,
        startup_timeout: float,
        retry_window: float,
        make_dispatch: MakeDispatch,
        batcher: Batcher,
        validation: BatchValidation,
        launcher: LocalLauncher,
        metrics: ModelMetrics,
        threads: WorkerThreads | None = None,
        history: WorkerHistory | None = None,
        restore: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.gpu_id = load.gpu_id
        self.state = WorkerState.STARTING
        self.started_at = time.time()
        self.pid: int | None = None
        self.batcher = batcher
        self.dispatch: DispatchStrategy | None = None
        self.threads = threads or WorkerThreads(spec.torch, [])
        self._spec = spec
        self._load = load
        self._startup_timeout = startup_timeout
        self._start_seconds = max(START_SECONDS, startup_timeout)
        self._make_dispatch = make_dispatch
        self._launcher = launcher
        self._metrics = metrics
        #: As in TorchServe, its records have the worker's name in place of the thread's.
        self._log = logging.LoggerAdapter(logger, {"worker": spec.name})
        self._log_name = LOG_NAMES[self.state]
        self.results = LoadResults(spec.name, load.trials, batcher, validation, self._log)
        self._backoff = Backoff(retry_window)
        self._restore = restore
        self._changes = history or WorkerHistory()
        self._history = FailureHistory(spec.name, self._log)
        self._diagnostics = Diagnostics()
        #: Seconds for the process to end by itself after a stop; 0 if it was busy.
        self._grace = 0.0
        #: Whether it ends when the requests that were sent to it are answered; whether it ends now.
        self._draining = False
        self._stopping = False
        self._task: asyncio.Task[None] | None = None
        self._on_load: Callable[[], object] = lambda: None
        self._loop = asyncio.get_running_loop()
        self._first_outcome: asyncio.Future[Exception | None] = self._loop.create_future()

    def start(
        self, on_stopped: Callable[[], None], on_load: Callable[[], object] = lambda: None
    ) -> None:
        """Start the worker.

        ``on_stopped`` is called when it has stopped for good, ``on_load`` when the model is loaded
        and when the worker has failed.
        """
        self._on_load = on_load
        self._changes.changed(self.worker_id, self.state.value)
        self._task = asyncio.create_task(self._run(), name=self._spec.name)
        # A callback, not the task's last lines: a task that is cancelled early does not run them.
        self._task.add_done_callback(partial(self._on_stopped, on_stopped))

    async def first_outcome(self) -> Exception | None:
        """Wait for the end of the first load, which has a deadline; return its failure or None."""
        return await asyncio.shield(self._first_outcome)

    @property
    def is_ready(self) -> bool:
        """Whether it can receive a batch."""
        return self.state is WorkerState.READY

    @property
    def can_answer(self) -> bool:
        """Whether it is READY, or was and is being replaced, probably with success."""
        is_ended = self.is_stopped or self._draining
        return self.is_ready or (self._history.has_loaded and not is_ended)

    @property
    def is_busy(self) -> bool:
        """Whether it has requests in flight."""
        return self.dispatch is not None and self.dispatch.is_busy

    @property
    def takes_interrupts(self) -> bool:
        """Whether its handler receives Ctrl-C, because it is running and shares the terminal."""
        return self._spec.terminal and self.state in (WorkerState.LOADING, WorkerState.READY)

    @property
    def is_stopped(self) -> bool:
        """Whether it has stopped for good."""
        return self.state is WorkerState.STOPPED

    @property
    def is_healthy(self) -> bool:
        """TorchServe's health: never failed, or failing for less than the retry window."""
        return not self.is_stopped and not self._backoff.given_up(time.monotonic())

    @property
    def last_failure(self) -> Failure | None:
        """The latest failure, also where it has recovered; None if there was none."""
        return self._history.last

    @property
    def cannot_load(self) -> bool:
        """Whether the latest loads have failed (`FailureHistory.cannot_load`)."""
        return self._history.cannot_load

    def share_out(self, torch: TorchOptions, tried: list[int]) -> None:
        """Use another share of the cores, and ``tried`` numbers of threads at the next load."""
        self.threads.share_out(torch, tried)
        self._adjust_threads()

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
        if not self._stopping:  # a second cancellation would interrupt the clean-up of the first
            self._stopping = True
            self._task.cancel()
        await asyncio.wait({self._task})  # no deadline: `LocalProcess.stop` has one

    async def _run(self) -> None:
        while True:
            try:
                await self._run_process()
            except Exception as error:  # noqa: BLE001 - any failure leads to another try
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
        self._set_state(WorkerState.STARTING)
        if self._restore is not None:
            await self._restore()  # it may unpack gigabytes, and has its own deadline
        self.started_at = time.time()
        began = time.monotonic()
        spec = replace(self._spec, threads=self.threads.give(), torch=self.threads.options)
        process = await self._start_process(spec)
        self.pid = process.pid
        close = process.sock.close
        grace = 0.0
        try:
            connection = await WorkerConnection.from_socket(
                process.sock, max_response_bytes=self._load.max_response_bytes, name=spec.name
            )
            close = connection.close
            # Not at once: usually the last reply and EOF can still be read from the socket. A child
            # of the process may hold it open.
            end = partial(connection.fail, "Worker process ended.", Disconnected)
            process.on_exit(partial(self._loop.call_later, _LAST_REPLY_SECONDS, end))
            if self._draining:
                raise asyncio.CancelledError  # noqa: TRY301 - it was stopped during its start
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

    async def _start_process(self, spec: WorkerSpec) -> LocalProcess:
        try:
            async with asyncio.timeout(self._start_seconds) as limit:
                return await self._launcher.start(spec)
        except TimeoutError:
            if not limit.expired():
                raise
            raise StartTimedOut(self._start_seconds) from None

    async def _load_model(
        self, connection: WorkerConnection, process: LocalProcess, start_by: float
    ) -> None:
        self._set_state(WorkerState.LOADING)
        trials = self.results.trials(
            self.threads.tried, are_threads_known=self.threads.found is not None
        )
        batching = self.batcher.batching  # which may have changed since this worker was made
        load = replace(
            self._load,
            batch_size=batching.max_size,
            compiled_sizes=list(batching.compiled_sizes),
            trials=trials,
        )
        # A debugged handler may stop at a breakpoint in its initialize().
        timeout = None if self._spec.terminal else self._startup_timeout
        try:
            left = max(_LEAST_START_SECONDS, start_by - time.monotonic())
            loaded = await connection.load(load, timeout, left)
        except StartTimedOut:
            raise StartTimedOut(self._start_seconds) from None
        except ConnectionLost as loss:
            loss.cause = await find_cause(loss, process, "startupTimeout", timeout)
            self.results.lost(loss, trials)
            raise
        if isinstance(loaded, LoadFailure):
            permanent = loaded.permanent and not _is_being_edited(self._spec)
            raise LoadFailed(loaded.code, loaded.message, permanent=permanent)
        if connection.lost.done():  # after its reply: it must not receive a batch
            end = connection.lost.result()
            end.cause = await find_cause(end, process, "startupTimeout", timeout)
            raise end
        self.results.add(loaded)
        self.threads.loaded(loaded)
        self._metrics.reported(loaded.metrics)
        self._set_state(WorkerState.READY)
        self._backoff.succeeded()
        self._history.loaded()
        self._set_outcome(None)
        self._on_load()

    async def _serve(self, connection: WorkerConnection, process: LocalProcess) -> NoReturn:
        """Let it serve until it is lost; raises ConnectionLost."""
        dispatch = self.dispatch = self._make_dispatch(connection, self.batcher, self._metrics)
        dispatch.worker_id = self.worker_id
        # At once, not when this task wakes: a batch sent in between would be lost too.
        connection.on_lost = dispatch.stop_accepting
        dispatch.start()
        self._adjust_threads()
        cause = "It was stopped."
        try:
            loss = await asyncio.shield(connection.lost)
            # Before the cause is known and the process has ended, which may take seconds.
            self._log.warning("%s Worker disconnected. %s", self._spec.name, LOG_NAMES[self.state])
            self._set_state(WorkerState.FAILED)
            loss.cause = await find_cause(loss, process, "responseTimeout", dispatch.timeout)
            loss.over_requests = dispatch.is_busy
            cause = loss.cause or str(loss)
            # Before clients are answered: they may read the description of the worker next.
            self._history.last = Failure.of(loss, Diagnostics())
            raise loss
        finally:
            self._grace = 0.0 if dispatch.is_busy else _LEAVE_SECONDS
            if connection.has_answered:
                self._history.answered()
                if not isinstance(connection.failure, Poisoned):
                    self._backoff.answered()
            dispatch.on_connection_lost(cause)
            self.dispatch = None

    def _adjust_threads(self) -> None:
        # The requests of coroutines have no order, and their threads cannot be replaced between.
        if self.dispatch is not None and not self._load.asynchronous:
            self.threads.adjust(self.dispatch.connection, self.dispatch.timeout)

    def _on_failure(self, error: Exception) -> float | None:
        """Record a failure; returns the seconds until the next try, None for no other try."""
        was_ready = self.state is WorkerState.FAILED  # set by `_serve`
        self._history.failed(error, self._diagnostics, was_ready=was_ready)
        self._diagnostics = Diagnostics()
        if isinstance(error, LoadFailed):
            self._log_change(LOAD_FAILED)
        self._set_state(WorkerState.FAILED)
        if (failure := self._history.last) is not None:
            self._changes.changed(self.worker_id, self.state.value, failure.reason)
        self._metrics.worker_failures.update(1)
        self._history.recovering()
        loss = error if isinstance(error, ConnectionLost) else None
        if loss is None or not loss.in_trial:  # else it may load without
            self._set_outcome(error)
        self._on_load()
        if isinstance(error, LoadFailed) and error.permanent:
            self._log.error("Worker %d is given up: another try would not help.", self.worker_id)
            return None
        over_requests = loss is not None and loss.over_requests
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
        self._log_change(LOG_NAMES[state])
        self.state = state
        self._changes.changed(self.worker_id, state.value)

    def _log_change(self, name: str) -> None:
        if name != self._log_name:
            self._log.info("%s State change %s -> %s", self._spec.name, self._log_name, name)
            self._log_name = name


def _is_being_edited(spec: WorkerSpec) -> bool:
    return Path(spec.model_dir).is_symlink()  # its code may change before the next try
