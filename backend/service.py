"""A loaded model: a batch of inputs in, as many predictions out.

The handler is foreign code, so this is where `Any` and the blind except are at home. Whatever it
does short of ending the process becomes a reply: a status and a sentence for the clients, a
traceback for the model log. An exception speaks for the whole batch (the handler saw it as one); a
result that cannot be sent speaks only for its own request.

A handler may answer in pieces (`Context.send_intermediate`); what it returns is then the last one.
A batch may be padded for a model of fixed sizes (`backend.padding`), and nothing of the padding
leaves. A handler that is a coroutine has one request at a time and a context of its own for each,
because several of them are under way.
"""

import inspect
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from marserve.backend.context import Context, RequestProcessor, WarmUp
from marserve.backend.failures import batch_status, failure_of, poison_of
from marserve.backend.metrics import MetricsStore
from marserve.backend.padding import padded, without_padding
from marserve.backend.protocol import STREAM_NEXT, Input, Part, Prediction, Reply
from marserve.backend.results import describe_unsendable, encode_result

logger = logging.getLogger(__name__)

EntryPoint = Callable[[Any, Context], Any]
Send = Callable[[Reply], None]

_JSON_TYPE = "application/json"
_PHRASES = {500: "Internal Server Error", 503: "Service Unavailable"}
_TEXT_PREFIX = "text"


class StagesOfBatch(Protocol):
    """A batch on its way through the stages of its handler.

    Attributes:
        seconds: How long they took so far.
    """

    seconds: float

    def advance(self) -> None:
        """Run the next stage."""


class Stages(Protocol):
    """A handler whose stages can be run one by one: `marserve.handlers.base_handler`."""

    def begin_overlapping(self) -> None:
        """Called once, before the first batch."""

    def enter_stages(self, data: Any, context: Context) -> Any:
        """Begin with a batch; None for one that the entry point has to answer, all by itself."""

    def leave_stages(self, batch: Any) -> Any:
        """The answers of a batch that has been through all `protocol.STAGES`."""


def _to_nobody(_piece: Reply) -> None:
    """Pieces that nobody asked for."""


def _no_sample() -> None:
    """A handler without a sample input."""


class Service:
    """A model that is ready to predict.

    Args:
        entry_point: The handler's ``handle(data, context)``.
        context: The one context of this process, given to the handler with every batch.
        decode_input: Whether JSON and text parts reach the handler decoded (else as bytearray).
        max_response_bytes: Longest body of one prediction.
        sample_input: Asks the handler for an input such as clients send: bytes, str or what can be
            JSON; None where it has none.
        stages: What takes batches through the handler's stages one by one, where those of several
            batches are to overlap; else None.

    Attributes:
        context: As given.
        poison: Why the process can serve no more (`failures`), empty while it can.
    """

    def __init__(
        self,
        entry_point: EntryPoint,
        context: Context,
        *,
        decode_input: bool = True,
        max_response_bytes: int = 6_553_500,
        sample_input: Callable[[], Any] = _no_sample,
        stages: Stages | None = None,
    ) -> None:
        self.sample_input = sample_input
        self.stages = stages
        self.context = context
        self.poison = ""
        self._entry_point = entry_point
        self._decode_input = decode_input
        self._max_response_bytes = max_response_bytes

    def predict(self, inputs: Sequence[Input], send: Send = _to_nobody, run_as: int = 0) -> Reply:
        """Run the handler once over the batch.

        Args:
            inputs: The batch.
            send: Takes the pieces that the handler answers meanwhile.
            run_as: How many rows the handler gets, where that is more than there are inputs.
        """
        reply = self._predict(inputs, send, run_as)
        self.poison = self.poison or reply.poisoned
        if run_as > len(inputs):
            reply.metrics = without_padding(reply.metrics)
        return reply

    def _predict(self, inputs: Sequence[Input], send: Send, run_as: int) -> Reply:
        context = self.context
        try:
            run = BatchRun(self, context, inputs, send, run_as)
            started = time.perf_counter()
            results = self._entry_point(run.data, context)
            return run.finished(results, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context)
        finally:
            context.on_intermediate = None

    async def predict_one(self, one: Input, send: Send = _to_nobody) -> Reply:
        """Run a handler that is a coroutine over one request, beside others."""
        context = self.context
        try:
            context = context.for_request()
            run = BatchRun(self, context, [one], send)
            started = time.perf_counter()
            results = self._entry_point(run.data, context)
            if inspect.isawaitable(results):
                results = await results
            return run.finished(results, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001 - foreign code
            return failure_reply(error, context)
        finally:
            context.on_intermediate = None  # what a task of the handler says later goes nowhere

    def take_metrics(self) -> list[list[Any]]:
        """Return what was reported since the last reply, as rows of `backend.metrics`."""
        return _drained(self.context)

    def take_warm_ups(self) -> list[WarmUp]:
        """Return what is to be run before the first batch; from now on there is nothing."""
        taken, self.context.warm_ups = self.context.warm_ups, []
        return taken

    @contextmanager
    def without_traces(self) -> Iterator[None]:
        """Have the batches run inside leave no trace in the context: no requests, no metrics."""
        context = self.context
        store: Any = context.metrics
        earlier = self.take_metrics()  # what the handler reported while it was initialised
        ids = getattr(store, "request_ids", None)
        try:
            yield
        finally:
            self.take_metrics()
            context.request_ids = context.request_processor = context.stopping_criteria = None
            if isinstance(store, MetricsStore):
                store.request_ids = ids
                store.put_back(earlier)

    def row(self, one: Input) -> dict[str, Any]:
        """The handler's dict of one request: part name to decoded value."""
        if not self._decode_input:
            return {part.name: part.body for part in one.parts}
        return {part.name: _decoded(part) for part in one.parts}

    def prediction(self, place: int, result: Any, processor: RequestProcessor) -> Prediction:
        """One result with what the handler said about its answer."""
        try:
            body = encode_result(result)
        except Exception as error:  # foreign objects decide how they serialise
            if poison_of(error):  # a GPU's errors may show only when its results are fetched
                raise
            logger.warning("The result of request %d cannot be sent.", place, exc_info=True)
            why = describe_unsendable(result)
            return _error(503, f"Unsupported model output data type. {why}".rstrip())
        if len(body) > self._max_response_bytes:
            return _error(
                500,
                f"Message size exceed limit: {len(body)}. Raise max_response_size "
                f"(now {self._max_response_bytes}).",
            )
        status: Any = processor.get_response_status_code()  # the handler may have set anything
        if not isinstance(status, int):
            return _error(503, f"The handler set the status {status!r}.")
        reason: Any = processor.get_response_status_phrase() or ""
        headers: Any = processor.get_response_headers()
        if not isinstance(reason, str) or not _is_text_mapping(headers):
            return _error(503, "The handler set a reason phrase or a header that is no text.")
        return Prediction(body, status, reason, headers)


class BatchRun:
    """One call of the handler: what it is called with, and what its results become.

    Args:
        service: Whose handler it is.
        context: What the handler is called with; it is set to this batch.
        inputs: The batch.
        send: Takes the pieces the handler answers before it returns.
        run_as: How many rows the handler gets, where that is more than there are inputs; what it
            says of the rows behind the inputs goes nowhere.
    """

    def __init__(
        self,
        service: Service,
        context: Context,
        inputs: Sequence[Input],
        send: Send,
        run_as: int = 0,
    ) -> None:
        self._count = len(inputs)
        if run_as > self._count:
            inputs = padded(inputs, run_as)
        self.context = context
        self.data = [service.row(one) for one in inputs]
        self._service = service
        self._send = send
        self._streams = False
        # Our own: the context is the handler's to play with. What it puts in the place of the
        # processors counts only if it is as many of them.
        self._ids = {place: one.id for place, one in enumerate(inputs)}
        self._processors = [RequestProcessor(_headers(one)) for one in inputs]
        context.request_ids = dict(self._ids)
        context.request_processor = list(self._processors)
        context.stopping_criteria = None
        context.on_intermediate = self._send_piece

    def finished(self, results: Any, seconds: float) -> Reply:
        """What the handler returned, as the reply to the batch."""
        reply = self._checked(results)
        reply.metrics = _drained(self.context)
        reply.handler_ms = round(seconds * 1000, 3)
        return reply

    def _checked(self, results: Any) -> Reply:
        expected = len(self._processors)
        shown: Any = self.context.request_processor
        if _are_processors(shown, expected):
            self._processors = shown
        if isinstance(results, list):
            results = list.copy(results)  # a subclass may lie about its length and its items
        if not isinstance(results, list):
            logger.warning("The handler returned %s, not a list.", type(results).__name__)
            return Reply(503, "Invalid model predict output")
        if len(results) != expected:
            logger.warning(
                "The handler returned %d results for %d requests.", len(results), expected
            )
            return Reply(503, "number of batch response mismatched")
        del results[self._count :]
        if self._streams:
            for processor in self._processors:
                processor.add_response_property(STREAM_NEXT, "false")
        if self.context.stopping_criteria is not None:
            self._apply_stopping_criteria(results)
        predict = self._service.prediction
        return Reply(predictions=list(map(predict, range(self._count), results, self._processors)))

    def _apply_stopping_criteria(self, results: Sequence[Any]) -> None:
        """Ask for each request whether its answer is complete; an author's mistake ends it."""
        criteria = self.context.stopping_criteria or ()
        for processor, result, criterion in zip(self._processors, results, criteria, strict=False):
            if criterion is None:
                continue
            try:
                stops = criterion(result)
            except Exception:  # foreign code
                logger.warning("A stopping criterion failed.", exc_info=True)
                stops = True
            if stops is not None:
                processor.add_response_property(STREAM_NEXT, "false" if stops else "true")

    def _send_piece(
        self, results: Sequence[Any], ids: Mapping[int, str] | None, message: str, code: int
    ) -> None:
        """Send what the handler has so far of the requests named by ``ids``, all by default."""
        if code != 200:
            self._send(Reply(batch_status(code), message or "Prediction failed", more=True))
            return
        places = self._places(self._ids if ids is None else ids)
        if not isinstance(results, list | tuple) or len(results) != len(places):
            raise ValueError(
                f"An intermediate response needs a list with a result for each of "
                f"{len(places)} requests"
            )
        placed = zip(places, results, strict=True)
        self._send_results([(place, one) for place, one in placed if place < self._count])

    def _send_results(self, placed: Sequence[tuple[int, Any]]) -> None:
        """Send a piece with a result for each of these places, if it is about any."""
        if not placed:
            return
        self._streams = True
        predictions = []
        for place, result in placed:
            self._processors[place].add_response_property(STREAM_NEXT, "true")
            prediction = self._service.prediction(place, result, self._processors[place])
            prediction.headers = dict(prediction.headers)  # those of the next piece may differ
            predictions.append(prediction)
        self._send(Reply(predictions=predictions, places=[place for place, _ in placed], more=True))

    def _places(self, ids: Mapping[int, str]) -> list[int]:
        """Where in the batch the requests stand that the handler speaks of."""
        place_of = {id_: place for place, id_ in self._ids.items()}
        try:
            return [place_of[ids[index]] for index in sorted(ids)]
        except KeyError as error:
            raise ValueError(f"No request {error} in the batch") from None


def _are_processors(value: Any, count: int) -> bool:
    """Whether a handler may have put this in the place of a batch's processors."""
    return (
        isinstance(value, list)
        and len(value) == count
        and all(isinstance(one, RequestProcessor) for one in value)
    )


def failure_reply(error: BaseException, context: Context) -> Reply:
    """What the handler raised, or its results made us raise, as the reply to the batch."""
    logger.warning("Invoking custom service failed.", exc_info=error)
    code, message = failure_of(error)
    return Reply(code, message, metrics=_drained(context), poisoned=poison_of(error))


def _drained(context: Context) -> list[list[Any]]:
    """What the handler reported; nothing where it has put something else in the store's place."""
    store: Any = context.metrics
    return store.drain() if isinstance(store, MetricsStore) else []


def _error(status: int, message: str) -> Prediction:
    body = {"code": status, "type": "InternalServerException", "message": message}
    reason = _PHRASES.get(status, "")
    headers = {"content-type": _JSON_TYPE}
    return Prediction(json.dumps(body, indent=2).encode() + b"\n", status, reason, headers)


def _is_text_mapping(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )


def _headers(one: Input) -> dict[str, Any]:
    """What the handler sees as headers: one entry per part, and the request's own over them."""
    described: dict[str, Any] = {
        part.name: {"content-type": part.content_type} for part in one.parts
    }
    described.update(one.headers)
    return described


def _decoded(part: Part) -> Any:
    media_type = part.content_type
    try:
        if media_type == _JSON_TYPE:
            return json.loads(bytes(part.body))
        if media_type.startswith(_TEXT_PREFIX):
            return bytes(part.body).decode()
    except (ValueError, RecursionError):
        logger.warning("Part %r is not the %s it says; passed on as bytes.", part.name, media_type)
    return part.body
