"""The life of one worker: start, load, serve, restart with back-off, drain, stop.

    STARTING -> LOADING -> READY -> STOPPED
        any of these    -> FAILED -> STARTING   (after the back-off)
                                  -> STOPPED    (the retry window is over)

The supervisor owns one task, and through it the process and the connection. The task sees to the
worker's life; batches pass by it (`workers.serving`).

Two kinds of failure: what the worker *reports* (a reply with a code) is the batch's, and the worker
lives; a worker that cannot report any more (`ConnectionLost`) takes its batch with it and is
replaced. A model that cannot be loaded for a reason that the next try would meet again (a mistake
in the handler's code) is not tried again.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NoReturn

from marserve.backend.protocol import Load, Reply
from marserve.frontend.batching.batcher import Batcher
from marserve.frontend.telemetry.metrics import ModelMetrics
from marserve.frontend.workers.backoff import Backoff
from marserve.frontend.workers.connection import (
    ConnectionLost,
    Disconnected,
    ResponseTimedOut,
    WorkerConnection,
)
from marserve.frontend.workers.failures import Failure, Remains, brief, report
from marserve.frontend.workers.launchers.launcher import Launcher, WorkerProcess, WorkerSpec
from marserve.frontend.workers.serving import Serving

MakeServing = Callable[[WorkerConnection, Batcher, ModelMetrics], Serving]

logger = logging.getLogger(__name__)

# How long a worker whose wire was closed may take to leave by itself, and then after SIGTERM.
_LEAVE_SECONDS = 2.0
_LAST_REPLY_SECONDS = 0.5
# How long after its wire a process may end: torchrun ends its other processes first.
_END_SECONDS = 5.0


class WorkerState(Enum):
    """Where a worker is in its life."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


# TorchServe's words, as operators grep them in the log.
_WORDS = {
    WorkerState.STARTING: "WORKER_STARTED",
    WorkerState.LOADING: "WORKER_STARTED",
    WorkerState.READY: "WORKER_MODEL_LOADED",
    WorkerState.FAILED: "WORKER_STOPPED",
    WorkerState.STOPPED: "WORKER_STOPPED",
}


# What a worker is for a moment that has told why its model cannot be loaded.
_LOAD_FAILED = "WORKER_ERROR"

TRANSITIONS: dict[WorkerState, frozenset[WorkerState]] = {
    WorkerState.STARTING: frozenset({WorkerState.LOADING, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.LOADING: frozenset({WorkerState.READY, WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.READY: frozenset({WorkerState.FAILED, WorkerState.STOPPED}),
    WorkerState.FAILED: frozenset({WorkerState.STARTING, WorkerState.STOPPED}),
    WorkerState.STOPPED: frozenset(),
}


@dataclass(frozen=True)
class WorkerTimeouts:
    """How long a worker may take, in seconds.

    Attributes:
        startup: For starting and loading, each.
        retry_window: See `Backoff`.
    """

    startup: float
    retry_window: float


class LoadFailed(Exception):
    """The worker reported that its model cannot be loaded.

    Attributes:
        code: The status it reported: 500, or 507 for out of memory.
        incurable: Whether the next try would fail for the same reason.
    """

    def __init__(self, code: int, reason: str, *, incurable: bool = False) -> None:
        super().__init__(reason)
        self.code = code
        self.incurable = incurable


class LostInSweep(ConnectionLost):
    """The worker ended, or hung, in a load that tried out sizes of batches."""


class StartTimedOut(ConnectionLost):
    """There was no process in time."""


def _nothing() -> None:
    """Nobody wants to know."""


class WorkerSupervisor:
    """Keeps one worker alive.

    Args:
        worker_id: The number that describe shows, TorchServe's "port".
        spec: How to start its process.
        load: What it is to load.
        timeouts: How long things may take.
        make_serving: How it serves once it is READY.
        batcher: Where its batches come from.
        launcher: What starts processes.
        metrics: What is counted, for its model.

    Attributes:
        state: Where it is in its life.
        started_at: Wall-clock time of the latest start of its process, seconds since the epoch.
        pid: Process id; None while there is no process.
    """

    def __init__(
        self,
        worker_id: int,
        spec: WorkerSpec,
        load: Load,
        timeouts: WorkerTimeouts,
        make_serving: MakeServing,
        batcher: Batcher,
        launcher: Launcher,
        metrics: ModelMetrics,
    ) -> None:
        self.worker_id = worker_id
        self.gpu_id = load.gpu_id
        self.state = WorkerState.STARTING
        self.started_at = time.time()
        self.pid: int | None = None
        self._spec = spec
        self._load = load
        self._timeouts = timeouts
        self._batcher = batcher
        self._launcher = launcher
        self._metrics = metrics
        self._backoff = Backoff(timeouts.retry_window)
        self._make_serving = make_serving
        self._serving: Serving | None = None
        self._failure: Failure | None = None
        #: Loads that failed since the last one that did not, and whether there was one.
        self._failed_loads = 0
        self._has_loaded = False
        self._remains = Remains()
        #: Timeouts without an answer in between.
        self._hung_in_a_row = 0
        #: When the present streak of failures began, in seconds since the epoch; None without one.
        self._recovering_since: float | None = None
        self._word = _WORDS[self.state]
        #: As in TorchServe, the worker is named where others name their thread.
        self._log = logging.LoggerAdapter(logger, {"worker": spec.name})
        #: What a worker that is stopped is granted to leave by itself: nothing while it is busy.
        self._patience = 0.0
        #: Whether it is to end when it has answered what it has in hand; whether it is to end now.
        self._draining = False
        self._stopping = False
        #: Whether its loads may try out sizes of batches: not again where that was its end.
        self._may_sweep = True
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._on_load: Callable[[], None] = _nothing
        self._first_outcome: asyncio.Future[Exception | None] = loop.create_future()

    def start(self, on_end: Callable[[], None], on_load: Callable[[], None] = _nothing) -> None:
        """Begin its life.

        Args:
            on_end: Called when it is over for good.
            on_load: Called when its model is loaded, and when it has failed.
        """
        self._on_load = on_load
        self._task = asyncio.create_task(self._live(), name=self._spec.name)
        self._task.add_done_callback(lambda _: self._end(on_end))

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
    def is_busy(self) -> bool:
        """Whether it has requests in hand."""
        return self._serving is not None and self._serving.is_busy

    @property
    def takes_interrupts(self) -> bool:
        """Whether Ctrl-C is left to it: it shares the terminal, and there is somebody to get it."""
        return self._spec.terminal and self.state in (WorkerState.LOADING, WorkerState.READY)

    @property
    def is_stopped(self) -> bool:
        """Whether its life is over for good."""
        return self.state is WorkerState.STOPPED

    @property
    def is_healthy(self) -> bool:
        """TorchServe's health: never failed, or failing for less than the retry window."""
        return self.state is not WorkerState.STOPPED and not self._backoff.given_up(_now())

    @property
    def last_failure(self) -> Failure | None:
        """How it failed last; None if it never did, or has done well since.

        Well is a load after a load that failed, and an answer after any other failure.
        """
        if self._serving is not None and self._serving.connection.has_answered:
            self._failure = None
        return self._failure

    @property
    def cannot_load(self) -> bool:
        """Whether its model cannot be loaded, as far as the latest try tells.

        Where it could be loaded before, one failure says little: what the dead worker held of a
        GPU's memory, say, may not have been given back yet.
        """
        return self._failed_loads > (1 if self._has_loaded else 0)

    async def stop(self, drain: float) -> None:
        """End it: the batch in hand may finish for ``drain`` seconds. Safe to call twice."""
        if self._task is None:
            return
        self._draining = True
        if self._serving is not None:
            self._serving.rest()
        if self._serving is not None and self._serving.is_busy and drain > 0:
            ends: set[asyncio.Future[None]] = {self._serving.idle, self._task}
            await asyncio.wait(ends, timeout=drain, return_when=asyncio.FIRST_COMPLETED)
        if not self._stopping:  # a second cancellation would interrupt the first one's tidying up
            self._stopping = True
            self._task.cancel()
        await asyncio.wait({self._task})

    async def _live(self) -> None:
        while True:
            try:
                await self._one_life()
            except Exception as error:  # noqa: BLE001 - whatever it was, a worker's life goes on
                delay = self._note(error)
            if delay is None or self._draining:
                break
            await asyncio.sleep(delay)

    def _end(self, on_end: Callable[[], None]) -> None:
        # A callback of the task, not its last lines: a task cancelled early has no lines.
        self._become(WorkerState.STOPPED)
        why = self._failure.reason if self._failure else "the worker was stopped"
        self._settle(ConnectionLost(why))
        self._metrics.worker_gone(self._spec.name)
        on_end()

    async def _one_life(self) -> NoReturn:
        """From the start of a process to its end.

        Raises:
            ConnectionLost, LoadFailed, OSError: Why it ended, as far as it can be foreseen; the
                process is gone by then.
        """
        self._become(WorkerState.STARTING)
        self.started_at = time.time()
        began = _now()
        process = await self._start_process()
        self.pid = process.pid
        connection = None
        leave = 0.0
        try:
            connection = await WorkerConnection.over(
                process.wire, max_response_bytes=self._load.max_response_bytes
            )
            process.on_end(partial(_lose_later, connection))
            if self._draining:
                raise asyncio.CancelledError  # noqa: TRY301 - told to stop while it started
            await self._load_model(connection, process)
            self._metrics.worker_loaded(self._spec.name, _now() - began)
            await self._serve(connection, process)
        except asyncio.CancelledError:
            leave = self._patience
            raise
        finally:
            if connection is None:
                process.wire.close()
            else:
                connection.close()
            status = await process.stop(leave)
            self._remains = process.remains
            logger.debug("%s ended with status %d.", self._spec.name, status)
            self.pid = None

    async def _start_process(self) -> WorkerProcess:
        # Not asyncio.wait_for: until Python 3.12 it swallows a cancellation that comes in the turn
        # in which the process does, and a worker that is to stop would begin to serve.
        starting = asyncio.ensure_future(self._launcher.start(self._spec))
        try:
            await asyncio.wait({starting}, timeout=self._timeouts.startup)
        except asyncio.CancelledError:
            if starting.done() and not starting.cancelled() and starting.exception() is None:
                await starting.result().stop(0)
            starting.cancel()
            raise
        if starting.cancel():
            late = StartTimedOut("Backend worker startup time out.")
            late.cause = _no_answer("startupTimeout", self._timeouts.startup)
            raise late
        return starting.result()

    async def _load_model(self, connection: WorkerConnection, process: WorkerProcess) -> None:
        self._become(WorkerState.LOADING)
        # As many as batches hold now: that may have been changed since this worker was made.
        load = replace(self._load, batch_size=self._batcher.batching.most)
        # Known by a sweep or by traffic: nobody waits for another sweep.
        if self._batcher.costs.is_known or not self._may_sweep:
            load = replace(load, sweep_sizes=[])
        try:
            # Somebody who debugs may stand at a breakpoint in the handler's initialize().
            limit = None if self._spec.terminal else self._timeouts.startup
            reply = await connection.load(load, limit)
        except ConnectionLost as loss:
            timeout = _no_answer("startupTimeout", self._timeouts.startup)
            loss.cause = await _cause(loss, process, timeout)
            if not load.sweep_sizes:
                raise
            self._may_sweep = False
            in_sweep = LostInSweep(
                f"{loss.args[0]} (while it loaded or tried out sizes of batches)"
            )
            in_sweep.cause = loss.cause
            raise in_sweep from loss
        if reply.code != 200:
            incurable = reply.incurable and not _may_be_mended(self._spec)
            raise LoadFailed(reply.code, reply.message, incurable=incurable)
        self._learn_costs(reply)
        self._metrics.reported(reply.metrics)
        self._become(WorkerState.READY)
        self._backoff.succeeded()
        if self._failed_loads:
            self._failure = None
        self._failed_loads, self._has_loaded = 0, True
        if self._recovering_since is not None:
            self._recovering_since = None
            self._log.info("Auto recovery succeeded, reset recoveryStartTS")
        self._settle(None)
        self._on_load()

    def _learn_costs(self, reply: Reply) -> None:
        """Take in what the worker found out when it tried the sizes of batches."""
        if reply.costs:
            self._batcher.seed((size, seconds) for size, seconds, _ in reply.costs)
        if reply.too_large:
            fits = reply.costs[-1][0] if reply.costs else 1
            self._batcher.out_of_memory(reply.too_large, fits)
        choice = self._batcher.choice
        if reply.costs and choice is not None:
            logger.info("%s: batches of up to %d: %s.", self._spec.name, choice.size, choice.why)

    async def _serve(self, connection: WorkerConnection, process: WorkerProcess) -> NoReturn:
        """Let it serve until it is lost.

        Raises:
            ConnectionLost: The worker cannot go on; what it had in hand has been answered.
        """
        serving = self._serving = self._make_serving(connection, self._batcher, self._metrics)
        # At once, not when this task wakes: a batch handed over in between would be lost with it.
        connection.on_lost = serving.rest
        serving.begin()
        cause = "It was stopped."
        try:
            loss = await asyncio.shield(connection.lost)
            timeout = _no_answer("responseTimeout", serving.timeout)
            loss.cause = await _cause(loss, process, timeout)
            cause = loss.cause or str(loss)
            # Before the clients know: they may ask for it.
            self._failure = _failure_of(loss, Remains())
            raise loss
        finally:
            self._patience = 0.0 if serving.is_busy else _LEAVE_SECONDS
            if connection.has_answered:
                self._hung_in_a_row = 0
            serving.lose(cause)
            self._serving = None

    def _note(self, error: Exception) -> float | None:
        """Record a failure; the seconds until the next try, None when there is none."""
        if self.state is WorkerState.READY:
            self._log.warning("%s Worker disconnected. %s", self._spec.name, _WORDS[self.state])
        else:
            self._failed_loads += not isinstance(error, LostInSweep)
        failure = self._failure = _failure_of(error, self._remains)
        self._remains = Remains()
        self._log_failure(failure, error)
        if isinstance(error, LoadFailed):
            self._log_change(_LOAD_FAILED)
        self._become(WorkerState.FAILED)
        self._metrics.worker_failed()
        if self._recovering_since is None:
            self._recovering_since = failure.moment
            self._log.info("Auto recovery start timestamp: %d", failure.moment * 1000)
        else:
            self._log.warning("Auto recovery failed again")
        if not isinstance(error, LostInSweep):  # the model is not blamed for what a sample did
            self._settle(error)
        self._on_load()
        if isinstance(error, LoadFailed) and error.incurable:
            self._log.error("Worker %d is given up: another try would not help.", self.worker_id)
            return None
        delay = self._backoff.failed(_now())
        if delay is None:
            self._log.error("Worker %d is given up: its retry window is over.", self.worker_id)
        else:
            self._log.info("Retry worker: %d in %d seconds.", self.worker_id, delay)
        return delay

    def _log_failure(self, failure: Failure, error: Exception) -> None:
        """Tell the log, in the lines that TorchServe's operators have alerts for, and why."""
        if isinstance(error, ResponseTimedOut):
            self._hung_in_a_row += 1
            self._log.error("Number or consecutive unsuccessful inference %d", self._hung_in_a_row)
        # Why a model cannot be loaded is told in full where it was tried.
        text = report(
            failure,
            self._spec.name,
            is_timeout=isinstance(error, ResponseTimedOut | StartTimedOut),
            with_output=not isinstance(error, LoadFailed),
        )
        expected = isinstance(error, ConnectionLost | LoadFailed | OSError)
        self._log.error("%s", text, exc_info=None if expected else error)

    def _settle(self, outcome: Exception | None) -> None:
        if not self._first_outcome.done():
            self._first_outcome.set_result(outcome)

    def _become(self, state: WorkerState) -> None:
        if state is self.state:
            return
        assert state in TRANSITIONS[self.state], (self.state, state)
        self._log_change(_WORDS[state])
        self.state = state

    def _log_change(self, word: str) -> None:
        if word != self._word:
            self._log.info("%s State change %s -> %s", self._spec.name, self._word, word)
            self._word = word


def _may_be_mended(spec: WorkerSpec) -> bool:
    """Whether somebody may mend the code before the next try: who works in a linked directory."""
    return Path(spec.model_dir).is_symlink()


def _lose_later(connection: WorkerConnection) -> None:
    """Give up on a process that has ended though its wire is open: a child of it holds the wire.

    Later, because a last reply may still lie in the wire, and EOF behind it is the normal case.
    """
    loop = asyncio.get_running_loop()
    why = "Worker process ended."
    loop.call_later(_LAST_REPLY_SECONDS, connection.fail, why, Disconnected)


async def _cause(loss: ConnectionLost, process: WorkerProcess, timeout: str) -> str:
    """Find out why a worker was lost; a sentence, empty if that is said already."""
    if isinstance(loss, ResponseTimedOut):
        await process.write_stacks()
        return timeout
    if isinstance(loss, Disconnected):
        return await process.end_within(_END_SECONDS) or "It closed its connection and went on."
    return ""


def _failure_of(error: Exception, remains: Remains) -> Failure:
    if isinstance(error, ConnectionLost):
        return Failure(error.args[0], error.cause, time.time(), remains)
    return Failure(brief(str(error)), "", time.time(), remains)


def _no_answer(setting: str, seconds: float | None) -> str:
    return f"Timeout: no answer within {setting} ({seconds or 0:g} s)."


def _now() -> float:
    return time.monotonic()
