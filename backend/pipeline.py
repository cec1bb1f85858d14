"""Serves handlers whose stages overlap: each stage has its thread and its batch.

    thread        receive a batch, decode its inputs, preprocess
    main thread   inference: CUDA contexts and the thread pools of torch belong to one thread
    thread        postprocess, encode the answers, reply

A model on several devices processes several batches at a time: ``inference`` then runs in one more
thread than that, so that the first device does not wait while a result travels back (1.03 to 1.11
times the throughput). Replies leave in the order of the batches.

At most one batch waits between two stages. The worker asks for each batch when it is needed
(`_Pace`), because requests in the queue of the frontend can still be joined, overtaken or refused.
Simulated at half load with 20 ms per batch, the median latency is 97 ms if batches are sent as long
as the worker has capacity, 76 ms if one is asked for as another begins, and 41 ms here.

Batches that cannot be split into stages (descriptions, explanations, profiled ones), and samples,
run in the main thread, after all batches before them and before all behind them. ``sys.exit`` in
any stage ends the process after the batches before it are answered.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from marserve.backend.batch_run import BatchRun, failure_reply, without_padding
from marserve.backend.connection import FrontendConnection
from marserve.backend.metrics import is_about
from marserve.backend.protocol import (
    Compare,
    Compared,
    NextBatch,
    Piece,
    Predict,
    ProtocolError,
    Reply,
)
from marserve.backend.service import Service, Stages

_ROUND_TRIP_SECONDS = 0.002  # to the frontend and back; a tenth of that on an idle machine
_SAFETY = 1.2
_RECENT_BATCHES = 8
_MIN_BATCHES = 2


def serve_in_stages(
    connection: FrontendConnection, service: Service, compare: Callable[[Compare], Compared]
) -> None:
    """Answer batches, and comparisons, until the frontend closes the connection.

    Raises ProtocolError, ConnectionError, and SystemExit of a stage.
    """
    assert service.stages is not None
    service.stages.begin_overlapping()
    _Loop(connection, service, service.stages, compare).run()


class _Batch:
    """A batch and its failure, if any; ``send`` takes pieces of its answer."""

    def __init__(
        self,
        service: Service,
        stages: Stages,
        message: Predict,
        send: Callable[[Reply | Piece], None],
    ) -> None:
        self.message = message
        self.send = send
        self._ids = {item.id for item in message.inputs}
        self._stages = stages
        self._context = service.context.for_batch()
        self._error: Exception | None = None
        self._run: BatchRun | None = None
        self._steps: Iterator[float] | None = None
        self._seconds = self._started = 0.0
        try:
            self._run = run = service.begin(self._context, message, send)
            self._started = time.monotonic()
            if run is not None:
                self._ids = run.ids
                self._steps = stages.enter_stages(run.data, self._context)
        except Exception as error:  # noqa: BLE001 - foreign code
            self._error = error

    @property
    def runs_alone(self) -> bool:
        """Whether it cannot be split into stages."""
        return self._steps is None and self._error is None

    def advance(self) -> None:
        """Run its next stage, unless it has failed."""
        if self._steps is None or self._error is not None:
            return
        try:
            self._seconds = next(self._steps)
        except Exception as error:  # noqa: BLE001 - foreign code
            self._error = error

    def reply(self) -> Reply:
        """Return the reply, after the last stage."""
        # The traceback refers to this batch: a cycle that holds the memory of the model's last run.
        error, self._error = self._error, None
        reply = self._finished() if error is None else self._failed(error)
        del error
        self._context.on_intermediate = None
        reply.metrics = without_padding(reply.metrics)
        if reply.code != 200:  # those of other batches are not lost if this one runs again
            of_others = [row for row in reply.metrics if not is_about(row, self._ids)]
            if of_others:
                reply.metrics = [row for row in reply.metrics if is_about(row, self._ids)]
                self._context.metrics.put_back(of_others)
        return reply

    def _finished(self) -> Reply:
        assert self._run is not None
        try:
            results = self._stages.leave_stages(self._steps)
            took = time.monotonic() - self._started
            reply = self._run.finished(results, self._started, self._seconds)
            reply.paused_ms = round(max(0.0, took - self._seconds) * 1000, 3)
            return reply
        except Exception as error:  # noqa: BLE001 - foreign code
            return self._failed(error)

    def _failed(self, error: Exception) -> Reply:
        return failure_reply(error, self._context, self._run, inputs=self.message.inputs)


class _Pace:
    """Estimates from recent batches when to ask for the next, so that the model is never idle."""

    def __init__(self) -> None:
        self._preparing: deque[float] = deque(maxlen=_RECENT_BATCHES)
        self._predicting: deque[float] = deque(maxlen=_RECENT_BATCHES)

    def prepared(self, seconds: float) -> None:
        """Record the time of the first stage."""
        self._preparing.append(seconds)

    def predicted(self, seconds: float) -> None:
        """Record the time of the model, with the wait for the last stage."""
        self._predicting.append(seconds)

    @property
    def slack(self) -> float:
        """Seconds from the begin of a batch in the model until the next has to be asked for.

        Not positive if the first stage is the slowest or too few batches are known. Then the worker
        has to ask while it prepares the batch before.
        """
        if len(self._predicting) < _MIN_BATCHES:
            return 0.0
        return min(self._predicting) - (_SAFETY * max(self._preparing) + _ROUND_TRIP_SECONDS)


class _Loop:
    def __init__(
        self,
        connection: FrontendConnection,
        service: Service,
        stages: Stages,
        compare: Callable[[Compare], Compared],
    ) -> None:
        self._connection = connection
        self._compare = compare
        self._service = service
        self._stages = stages
        inferences = stages.concurrent_inferences()
        #: Threads that call the model; with one, it is the main thread.
        self._threads = inferences + 1 if inferences > 1 else 1
        #: Batches in the model and the last stage, in order.
        self._finishing: deque[Future[None]] = deque()
        self._pace = _Pace()
        self._model_is_free = threading.Event()
        #: Asks for the batch behind the one that was prepared last, if that has not been done.
        self._ask: Callable[[], None] | None = None

    def run(self) -> None:
        with (
            ThreadPoolExecutor(1, "finish") as last,
            ThreadPoolExecutor(self._threads, "predict") as middle,
            ThreadPoolExecutor(1, "prepare") as first,
        ):
            prepared = first.submit(self._prepare)
            try:
                while (batch := self._next(prepared)) is not None:
                    self._model_is_free.clear()
                    if isinstance(batch, Compare) or batch.runs_alone:
                        self._wait_finished(but=0)
                        self._run_alone(batch)
                        del batch
                        prepared = first.submit(self._prepare)
                    else:
                        prepared = first.submit(self._prepare)
                        began = time.perf_counter()
                        predicted = self._predict(batch, middle)
                        self._finishing.append(last.submit(self._finish, [batch], predicted))
                        del batch  # while this thread waits, the next one may need its memory
                        self._wait_finished(but=self._threads)
                        self._pace.predicted(time.perf_counter() - began)
                    self._model_is_free.set()
                self._wait_finished(but=0)
            finally:
                self._model_is_free.set()
                self._connection.stop_receiving()

    def _prepare(self) -> _Batch | Compare | None:
        """Receive a batch and run its first stage, or a comparison; None at the end."""
        if self._ask is not None:
            self._model_is_free.wait(self._pace.slack)
            self._ask()
            self._ask = None
        message = self._connection.receive()
        if message is None or isinstance(message, Compare):
            return message
        if not isinstance(message, Predict):
            raise ProtocolError(f"{type(message).__name__} is not expected now")
        began = time.perf_counter()
        send = functools.partial(self._connection.reply, message.number)
        ask = functools.partial(send, NextBatch())
        if self._pace.slack <= 0.0:
            ask()
        else:
            self._ask = ask
        batch = _Batch(self._service, self._stages, message, send)
        batch.advance()
        self._pace.prepared(time.perf_counter() - began)
        return batch

    def _next(self, prepared: Future[_Batch | Compare | None]) -> _Batch | Compare | None:
        """Wait for the next message; raises what a later stage raises meanwhile."""
        while self._finishing:
            either: tuple[Future[Any], ...] = (prepared, self._finishing[0])
            wait(either, return_when=FIRST_COMPLETED)
            if not self._finishing[0].done():
                break
            self._wait_finished(but=len(self._finishing) - 1)
        return prepared.result()

    def _wait_finished(self, *, but: int) -> None:
        """Wait until at most ``but`` batches are not answered."""
        while len(self._finishing) > but:
            self._finishing.popleft().result()

    def _predict(self, batch: _Batch, middle: ThreadPoolExecutor) -> Future[None] | None:
        if self._threads > 1:
            return middle.submit(batch.advance)
        batch.advance()
        return None

    def _run_alone(self, batch: _Batch | Compare) -> None:
        if isinstance(batch, Compare):
            self._connection.reply(batch.number, self._compare(batch))
        else:
            batch.send(self._service.predict(batch.message, batch.send))

    def _finish(self, last_reference: list[_Batch], predicted: Future[None] | None) -> None:
        if predicted is not None:
            predicted.result()
        batch = last_reference.pop()  # the executor keeps its arguments, here an empty list
        batch.advance()
        send, reply = batch.send, batch.reply()
        del batch  # while this thread sends, the next batch may need its memory
        send(reply)
