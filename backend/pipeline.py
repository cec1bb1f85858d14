"""The worker's loop for handlers whose stages overlap: each stage has a thread and a batch.

    thread        receive a batch, decode its inputs, preprocess
    main thread   inference: CUDA contexts and the thread pools of torch belong to one thread
    thread        postprocess, encode the answers, reply

A model that is itself a pipeline, spread over several devices, takes several batches at a time
(`concurrent_inferences`): then `inference` runs in as many threads and one more, so that its
first device need not wait for an answer to travel back. Batches leave in the order in which they
came.

Each thread is an executor's: a batch is handed over as a future's result, and an error with it. A
stage begins with another batch once the next stage has taken the last one, so that at most one
waits between two stages. The worker asks for each batch, and not before it needs it (`_Pace`): what
waits in the frontend can still be joined by others, overtaken, or refused in time. (Simulated with
20 ms a batch at half load, the median latency is 97 ms where whatever has room in the worker is
sent at once, 76 ms where a batch is asked for as one is begun, and 41 ms here, as without a
pipeline, which has a quarter less throughput.)

What cannot overlap (a question about the model, an explanation, a run under the profiler) runs in
the main thread when the batches before it have been answered, and before the next one is begun.

A failure is its batch's: it skips the other stages, and is answered in its turn. What ends a
process (``sys.exit``) ends it from any stage, once the batches before it are answered.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from marserve.backend.connection import FrontendConnection
from marserve.backend.protocol import Predict, Reply
from marserve.backend.service import (
    BatchRun,
    Service,
    Stages,
    StagesOfBatch,
    concurrent_inferences,
    failure_reply,
    without_padding,
)

# For `_Pace`. The way to the frontend and back takes a tenth of that on an idle machine.
_ROUND_TRIP_SECONDS = 0.002
_SAFETY = 1.2
_RECENT_BATCHES = 8
_MIN_BATCHES = 2

SendNumbered = Callable[[int, Reply], None]


def serve_in_stages(connection: FrontendConnection, service: Service, send: SendNumbered) -> None:
    """Answer batches until the frontend leaves; nothing is received from it afterwards.

    ``send`` sends a reply to the batch of a number, from any thread.

    Raises:
        ProtocolError, ConnectionError: The connection broke.
        BaseException: What a stage raised to end the process.
    """
    assert service.stages is not None
    service.stages.begin_overlapping()
    _Loop(connection, service, service.stages, send).run()


class _Batch:
    """A batch on its way; ``send`` takes the pieces of its answer."""

    def __init__(
        self, service: Service, stages: Stages, message: Predict, send: Callable[[Reply], None]
    ) -> None:
        self.message = message
        self.send = send
        self._ids = {item.id for item in message.inputs}
        self._stages = stages
        self._context = service.context.for_batch()
        self._error: Exception | None = None
        self._run: BatchRun | None = None
        self._in_stages: StagesOfBatch | None = None
        try:
            self._run = run = service.begin(self._context, message, send)
            if run is not None:
                self._ids = run.ids
                self._in_stages = stages.enter_stages(run.data, self._context)
        except Exception as error:  # noqa: BLE001 - foreign code
            self._error = error

    @property
    def runs_alone(self) -> bool:
        """Whether it cannot be run in stages."""
        return self._in_stages is None and self._error is None

    def advance(self) -> None:
        """Run its next stage, if nothing has failed so far."""
        if self._in_stages is None or self._error is not None:
            return
        try:
            self._in_stages.advance()
        except Exception as error:  # noqa: BLE001 - foreign code
            self._error = error

    def reply(self) -> Reply:
        """Return what became of it, behind its last stage."""
        try:
            reply = self._finished()
        except Exception as error:  # noqa: BLE001 - foreign code
            reply = failure_reply(error, self._context, self._run)
        self._context.on_intermediate = None
        reply.metrics = without_padding(reply.metrics)
        if reply.code != 200:
            self._keep_those_of_others(reply)
        return reply

    def _keep_those_of_others(self, reply: Reply) -> None:
        """Keep what other batches reported meanwhile from being lost with a failure's reply."""
        rows, reply.metrics = reply.metrics, []
        of_others = [row for row in rows if row[5] and self._ids.isdisjoint(row[5])]
        if of_others:
            self._context.metrics.put_back(of_others)

    def _finished(self) -> Reply:
        # Its traceback knows this batch: a circle, with the memory of the model's last run in it.
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        assert self._run is not None
        assert self._in_stages is not None
        answers: Any = self._stages.leave_stages(self._in_stages)
        return self._run.finished(answers, self._in_stages.seconds)


class _Pace:
    """When to ask for the next batch: so that it is prepared as the model becomes free.

    By the last batches, on the safe side: an idle model costs more than a batch that waits.
    """

    def __init__(self) -> None:
        self._preparing: deque[float] = deque(maxlen=_RECENT_BATCHES)
        self._predicting: deque[float] = deque(maxlen=_RECENT_BATCHES)

    def prepared(self, seconds: float) -> None:
        """Learn how long it took to prepare a batch."""
        self._preparing.append(seconds)

    def predicted(self, seconds: float) -> None:
        """Learn how long the model, and waiting for the last stage, took for a batch."""
        self._predicting.append(seconds)

    @property
    def slack(self) -> float:
        """Seconds for which one need not ask once the model has begun with a batch.

        Where there are none, preparing is what takes longest (or nothing is known yet), and one
        has to ask even before that, while another batch is prepared.
        """
        if len(self._predicting) < _MIN_BATCHES:
            return 0.0
        needed = _SAFETY * max(self._preparing) + _ROUND_TRIP_SECONDS
        return min(self._predicting) - needed


class _Loop:
    """See `serve_in_stages`."""

    def __init__(
        self, connection: FrontendConnection, service: Service, stages: Stages, send: SendNumbered
    ) -> None:
        self._connection = connection
        self._service = service
        self._stages = stages
        self._send = send
        inferences = concurrent_inferences(stages)
        #: Threads that call the model; with one, it is the main thread.
        self._threads = inferences + 1 if inferences > 1 else 1
        #: Batches handed to the model and not answered, in order.
        self._finishing: deque[Future[None]] = deque()
        self._pace = _Pace()
        self._model_is_free = threading.Event()
        #: Asks for the batch behind the one that was prepared last, if that has not been done.
        self._ask: Callable[[], None] | None = None

    def run(self) -> None:
        """Run the stage in the middle, until there is nothing left to do."""
        with (
            ThreadPoolExecutor(1, "finish") as last,
            ThreadPoolExecutor(self._threads, "predict") as middle,
            ThreadPoolExecutor(1, "prepare") as first,
        ):
            prepared = first.submit(self._prepare)
            try:
                while (batch := self._next(prepared)) is not None:
                    self._model_is_free.clear()
                    if batch.runs_alone:
                        self._wait_finished(but=0)
                        self._run_alone(batch)
                        del batch
                        prepared = first.submit(self._prepare)
                    else:
                        prepared = first.submit(self._prepare)
                        began = time.perf_counter()
                        predicted = self._predict(batch, middle)
                        self._finishing.append(last.submit(self._finish, [batch], predicted))
                        del batch  # while this thread waits, the next one may want its memory
                        self._wait_finished(but=self._threads)
                        self._pace.predicted(time.perf_counter() - began)
                    self._model_is_free.set()
                self._wait_finished(but=0)
            finally:
                self._model_is_free.set()
                self._connection.stop_receiving()

    def _prepare(self) -> _Batch | None:
        """Receive a batch and run its first stage; None when the frontend has left."""
        if self._ask is not None:
            self._model_is_free.wait(self._pace.slack)
            self._ask()
            self._ask = None
        message = self._connection.receive_batch()
        if message is None:
            return None
        began = time.perf_counter()
        send = functools.partial(self._send, message.number)
        ask = functools.partial(send, Reply(more=True))  # see `Reply.asks`
        if self._pace.slack <= 0.0:
            ask()
        else:
            self._ask = ask
        batch = _Batch(self._service, self._stages, message, send)
        batch.advance()
        self._pace.prepared(time.perf_counter() - began)
        return batch

    def _next(self, prepared: Future[_Batch | None]) -> _Batch | None:
        """Wait for the next batch, or for what the stages behind raise meanwhile."""
        while self._finishing:
            either: tuple[Future[Any], ...] = (prepared, self._finishing[0])
            wait(either, return_when=FIRST_COMPLETED)
            if not self._finishing[0].done():
                break
            self._wait_finished(but=len(self._finishing) - 1)
        return prepared.result()

    def _wait_finished(self, *, but: int) -> None:
        """Wait until all batches but so many are answered."""
        while len(self._finishing) > but:
            self._finishing.popleft().result()

    def _predict(self, batch: _Batch, middle: ThreadPoolExecutor) -> Future[None] | None:
        if self._threads > 1:
            return middle.submit(batch.advance)
        batch.advance()
        return None

    def _run_alone(self, batch: _Batch) -> None:
        message = batch.message
        predict = self._service.predict
        batch.send(predict(message.inputs, batch.send, message.run_as, message.rows))

    def _finish(self, last_reference: list[_Batch], predicted: Future[None] | None) -> None:
        if predicted is not None:
            predicted.result()
        batch = last_reference.pop()  # the executor holds on to arguments, and the list is empty
        batch.advance()
        send, reply = batch.send, batch.reply()
        del batch  # while this thread sends, the next batch may want its memory
        send(reply)
