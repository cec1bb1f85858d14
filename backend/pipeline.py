"""The worker's loop for handlers whose stages overlap: a thread for each, a batch in each.

    thread        receive a batch, decode its inputs, preprocess
    main thread   inference: CUDA contexts and the thread pools of torch belong to one thread
    thread        postprocess, encode the answers, reply

A batch waits in the hands of its stage until the next one takes it, so that at most one waits
between two stages. (Room for one more before the last stage was tried, and bought nothing.) The
worker asks for each batch, and not before it needs it (`_Pace`): what waits in the frontend can
still be joined by others, overtaken, or refused in time. Simulated with a model that takes about
20 ms whatever the size, Poisson arrivals at half of what it can do and four outstanding batches,
the median latency is 97 ms where whatever has room in the worker is sent at once, 76 ms where the
next batch is asked for as one is begun, and 41 ms here. That is what it is without a pipeline, too,
but there a quarter of the throughput is missing.

What cannot overlap (a question about the model, an explanation, a run under the profiler) runs in
the main thread when the batches before it have been answered, and before the next one is begun.

A failure is its batch's: it goes through the other stages untouched, and is told in its turn. What
ends a process (``sys.exit``) ends it from any stage, and takes no batch along that was in another
one behind it.
"""

import functools
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from marserve.backend.padding import without_padding
from marserve.backend.protocol import Predict, ProtocolError, Reply
from marserve.backend.service import BatchRun, Service, Stages, StagesOfBatch, failure_reply
from marserve.backend.wire import Wire

# For `_Pace`. The way to the frontend and back takes a tenth of that on an idle machine.
_ROUND_TRIP_SECONDS = 0.002
_SAFETY = 1.2
_BATCHES_LOOKED_AT = 8
_BATCHES_TO_KNOW = 2

SendNumbered = Callable[[int, Reply], None]


def serve_in_stages(wire: Wire, service: Service, send: SendNumbered) -> None:
    """Answer batches until the frontend leaves.

    Args:
        wire: Where they come from.
        service: The loaded model; its stages overlap.
        send: Sends a reply to the batch of a number, from any thread.

    Raises:
        ProtocolError, ConnectionError: The wire broke.
        BaseException: What a stage raised to end the process.
    """
    assert service.stages is not None
    service.stages.begin_overlapping()
    _Pipeline(wire, service, service.stages, send).run()


class _Batch:
    """A batch on its way.

    Args:
        service: The model.
        stages: Of its handler.
        message: The batch, as it came.
        send: Takes pieces of its answer.
    """

    def __init__(
        self, service: Service, stages: Stages, message: Predict, send: Callable[[Reply], None]
    ) -> None:
        self.message = message
        self.send = send
        self._ids = {one.id for one in message.inputs}
        self._stages = stages
        self._context = service.context.for_batch()
        self._error: Exception | None = None
        self._run: BatchRun | None = None
        self._passage: StagesOfBatch | None = None
        try:
            self._run = run = BatchRun(service, self._context, message.inputs, send, message.run_as)
            self._passage = stages.enter_stages(run.data, self._context)
        except Exception as error:  # noqa: BLE001 - foreign code
            self._error = error

    @property
    def runs_alone(self) -> bool:
        """Whether it cannot be run in stages."""
        return self._passage is None and self._error is None

    def advance(self) -> None:
        """Run its next stage, if nothing has failed so far."""
        if self._passage is None or self._error is not None:
            return
        try:
            self._passage.advance()
        except Exception as error:  # noqa: BLE001 - foreign code
            self._error = error

    def reply(self) -> Reply:
        """What became of it, behind its last stage."""
        try:
            reply = self._finished()
        except Exception as error:  # noqa: BLE001 - foreign code
            reply = failure_reply(error, self._context)
        self._context.on_intermediate = None
        reply.metrics = without_padding(reply.metrics)
        if reply.code != 200:
            self._keep_those_of_others(reply)
        return reply

    def _keep_those_of_others(self, reply: Reply) -> None:
        """What other batches reported meanwhile must not be lost with the reply of a failure."""
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
        assert self._passage is not None
        answers: Any = self._stages.leave_stages(self._passage)
        return self._run.finished(answers, self._passage.seconds)


class _Handover:
    """Gives one batch at a time to the next stage; None says that there are no more."""

    def __init__(self) -> None:
        self._given: SimpleQueue[_Batch | None] = SimpleQueue()
        self._taken = threading.Semaphore(0)

    def give(self, batch: _Batch | None) -> None:
        """Wait until the next stage has room for it."""
        self._given.put(batch)
        self._taken.acquire()

    def take(self) -> _Batch | None:
        """Wait for the next one; whoever gave it waits on, for `let_go`."""
        return self._given.get()

    def let_go(self) -> None:
        """Let the stage before begin with another batch."""
        self._taken.release()

    def wake(self) -> None:
        """Have the next stage look up, without waiting for it."""
        self._given.put(None)


class _Pace:
    """When to ask for the next batch: so that it is prepared as the model becomes free.

    By the last batches, on the safe side: an idle model costs more than a batch that waits.
    """

    def __init__(self) -> None:
        self._preparing: deque[float] = deque(maxlen=_BATCHES_LOOKED_AT)
        self._predicting: deque[float] = deque(maxlen=_BATCHES_LOOKED_AT)

    def prepared(self, seconds: float) -> None:
        """To prepare a batch took so long."""
        self._preparing.append(seconds)

    def predicted(self, seconds: float) -> None:
        """The model, and waiting for the last stage, took so long for a batch."""
        self._predicting.append(seconds)

    @property
    def slack(self) -> float:
        """Seconds for which one need not ask once the model has begun with a batch.

        Where there are none, preparing is what takes longest (or nothing is known yet), and one
        has to ask even before that, while another batch is prepared.
        """
        if len(self._predicting) < _BATCHES_TO_KNOW:
            return 0.0
        needed = _SAFETY * max(self._preparing) + _ROUND_TRIP_SECONDS
        return min(self._predicting) - needed


class _Pipeline:
    """See `serve_in_stages`."""

    def __init__(self, wire: Wire, service: Service, stages: Stages, send: SendNumbered) -> None:
        self._wire = wire
        self._service = service
        self._stages = stages
        self._send = send
        self._prepared = _Handover()
        self._predicted = _Handover()
        #: Held while the last stage is at work.
        self._finishing = threading.Lock()
        self._end: BaseException | None = None
        self._pace = _Pace()
        self._model_is_free = threading.Event()

    def run(self) -> None:
        """Be the stage in the middle, until there is nothing left to do."""
        last = self._start(self._finish, self._predicted.let_go)  # nobody else would
        self._start(self._prepare, _nothing)
        try:
            while (batch := self._prepared.take()) is not None and self._end is None:
                self._model_is_free.clear()
                self._predict(batch)
                self._model_is_free.set()
        finally:
            with self._finishing:  # what was predicted is answered, whatever happened here
                pass
        if self._end is not None:
            raise self._end
        self._predicted.give(None)
        last.join()

    def _start(self, stage: Callable[[], None], on_end: Callable[[], None]) -> threading.Thread:
        # A daemon: the first one may be in the midst of a message when a handler ends the process.
        target = functools.partial(self._guard, stage, on_end)
        thread = threading.Thread(target=target, name=stage.__name__.strip("_"), daemon=True)
        thread.start()
        return thread

    def _guard(self, stage: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Run a stage in a thread; the process ends by what ends it, from the main thread."""
        try:
            stage()
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread
            self._end = error
            on_end()
            self._prepared.wake()

    def _prepare(self) -> None:
        while (message := self._wire.receive()) is not None:
            if not isinstance(message, Predict):
                raise ProtocolError(f"{type(message).__name__} is not expected now")
            began = time.perf_counter()
            send = functools.partial(self._send, message.number)
            asks_early = self._pace.slack <= 0.0
            if asks_early:
                send(Reply(more=True))  # see `Reply.asks`
            batch = _Batch(self._service, self._stages, message, send)
            batch.advance()
            self._pace.prepared(time.perf_counter() - began)
            self._prepared.give(batch)
            if not asks_early:
                self._model_is_free.wait(self._pace.slack)
                send(Reply(more=True))
        self._prepared.wake()

    def _predict(self, batch: _Batch) -> None:
        if batch.runs_alone:
            with self._finishing:
                message = batch.message
                batch.send(self._service.predict(message.inputs, batch.send, message.run_as))
            self._prepared.let_go()
        else:
            began = time.perf_counter()
            self._prepared.let_go()
            batch.advance()
            self._predicted.give(batch)
            self._pace.predicted(time.perf_counter() - began)

    def _finish(self) -> None:
        while (batch := self._predicted.take()) is not None:
            with self._finishing:
                self._predicted.let_go()  # inside: whoever waits for the lock then waits for this
                batch.advance()
                send, reply = batch.send, batch.reply()
                del batch  # while this thread waits, the next one may want its memory
                send(reply)
        self._predicted.let_go()


def _nothing() -> None:
    """Nobody waits for this stage but in a way that it has seen to."""
