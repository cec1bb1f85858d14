"""The messages between the frontend and a worker; `backend.framing` encodes and decodes them.

    frontend to worker            answered by
    ------------------            -----------
    Load                          LoadStarted, then Loaded or LoadFailure
    Predict                       any number of Piece and NextBatch, then Reply
    EndSequence                   Reply without predictions
    Profile                       Profiled
    Compare                       Compared
    SetThreads                    ThreadsSet
    CancelPredict                 nothing; the Predict still has its Reply
    PiecesRead                    nothing

    worker to frontend            answered by
    ------------------            -----------
    Call                          CallReply
    CancelCall                    nothing

Frontend and worker are always of the same version.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: The stages of a handler: preprocess, inference, postprocess.
STAGES = 3
#: Response header: whether more pieces of an answer follow. TorchServe's clients read it.
STREAM_NEXT = "ts_stream_next"
#: Media type of a part that is a request of the Open Inference Protocol with tensors as bytes.
TENSORS_TYPE = "application/vnd.marserve.tensors"
#: The most unread bytes of an answer in pieces whose handler does not wait (`Context.drain`). Most
#: texts of language models are shorter, so that a slow client keeps no place in the worker.
STREAM_WINDOW = 1 << 20
#: The id of a request for an engine's metrics; a client's id has no line break.
ENGINE_METRICS = "\nmetrics"

Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """The peer broke the protocol; the message names what was received and what was expected."""


@dataclass(frozen=True)
class Trials:
    """The batches of samples that a worker runs between loading a model and serving it.

    Attributes:
        threads: Numbers of torch's threads to compare, rising. The last is what the process was
            started with.
        sizes: Batch sizes whose cost is measured, within about ``seconds``.
        validated_sizes: Batch sizes whose answers are compared with those of single requests.
        tolerance: Accepted difference of two numbers; 0 for the default of the model's precision.
        must_validate: Whether loading fails if answers differ or cannot be compared.
        only_differences: Whether only different answers are a failure; those that cannot be
            compared are not.
    """

    threads: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    seconds: float = 2.0
    validated_sizes: list[int] = field(default_factory=list)
    validation_seconds: float = 60.0
    tolerance: float = 0.0
    must_validate: bool = False
    only_differences: bool = False


@dataclass(frozen=True)
class Load:
    """Load this model.

    Attributes:
        asynchronous: Whether the handler is a coroutine; requests are then sent without waiting
            for replies.
        samples: Files in the model directory; if empty, the handler may return samples.
        compiled_sizes: The only sizes of batches; if empty, any up to ``batch_size``.
        declared_metrics: The metrics of metrics.yaml, as rows for `backend.metrics`.
        max_call_bytes: The largest body of a `Call`.
        stream_window: As `STREAM_WINDOW`; less if fewer bytes may wait in the frontend.
        stateful: Whether the requests of the model belong to sequences.
        batch_dims: The dimensions of a request's tensors, and of its answer's, that count the rows.
        stack_inputs: The library (numpy, torch) of whose arrays the handler gets one for each
            input, with all rows of the batch; empty for a list with a dict for each row.
        json_nan: How NaN and infinities are written in JSON (`json_text`).
    """

    model_name: str
    model_dir: str
    handler: str
    batch_size: int
    gpu_id: int | None
    limit_max_image_pixels: bool
    max_response_bytes: int
    server_version: str
    envelope: str = ""
    asynchronous: bool = False
    overlap_stages: bool = False
    samples: list[str] = field(default_factory=list)
    compiled_sizes: list[int] = field(default_factory=list)
    declared_metrics: list[list[Any]] = field(default_factory=list)
    max_call_bytes: int = 0
    stream_window: int = STREAM_WINDOW
    stateful: bool = False
    batch_dims: list[int] = field(default_factory=lambda: [0, 0])
    stack_inputs: str = ""
    json_nan: str = "keep"
    trials: Trials = field(default_factory=Trials)


@dataclass(frozen=True)
class LoadStarted:
    """The worker's process has started and begins to load."""


@dataclass(frozen=True)
class LoadFailure:
    """The model cannot be loaded; if ``permanent``, another try would fail in the same way."""

    code: int
    message: str
    permanent: bool = False


class BatchCost(NamedTuple):
    """The cost of a batch: seconds, and bytes of memory beyond those of the idle model."""

    size: int
    seconds: float
    peak_bytes: int


@dataclass
class Profiled:
    """The costs of batch sizes that were measured so far, smallest size first.

    Attributes:
        note: Why not all sizes were measured; empty if all were, or measuring has not ended.
        too_large: The size that failed after a smaller one, or ran out of memory; 0 for none.
        poisoned: As of `Reply`.
    """

    costs: list[BatchCost] = field(default_factory=list)
    note: str = ""
    too_large: int = 0
    poisoned: str = ""
    number: int = 0


@dataclass
class Loaded:
    """The model is loaded.

    Attributes:
        overlaps: The number of batches that the model processes at a time if stages overlap; else
            0. A worker whose stages overlap sends a `NextBatch` for each batch.
        ends_sequences: Whether the handler is called when a sequence ends (`EndSequence`).
        is_cancellable: Whether the worker receives a `CancelPredict`.
        is_relay: Whether it answers a request `ENGINE_METRICS`.
        tensors: The handler's declaration of its tensors (`tensors.checks.is_declaration`).
        compiled: The description by `Context.describe_compiled`; may be empty.
        warnings: `Context.load_warnings`.
        threads: The number of threads that torch computes with; 0 if it is not loaded.
        threads_why: Why the worker has chosen that number; empty if it has not.
        validation: A `profiling.validation.Validation`; empty if nothing was compared.
    """

    metrics: list[list[Any]] = field(default_factory=list)
    overlaps: int = 0
    ends_sequences: bool = False
    is_cancellable: bool = False
    is_relay: bool = False
    tensors: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    threads: int = 0
    threads_why: str = ""
    profiled: Profiled = field(default_factory=Profiled)
    validation: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Part:
    """One named field of an input; a plain body is ``body``. The media type has no parameters."""

    name: str
    content_type: str
    body: Buffer


@dataclass(slots=True)
class Input:
    """The input of one job: its request id, its headers as the client spelt them, and its parts."""

    id: str
    headers: dict[str, str]
    parts: list[Part]

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return sum([len(part.body) for part in self.parts])


@dataclass(slots=True)
class Predict:
    """Run one batch.

    Attributes:
        number: Its replies have the same, so that a reply to another batch (of a child that a
            handler forked, for example) does not reach the clients of this one.
        run_as: The number of rows that the handler gets, if larger than the number of rows in the
            batch: the last input is repeated, and the results of the repetitions are dropped.
        rows: How many rows of the batch each input is; empty for one each. An input that is several
            is a block: rows of one request in tensors.
    """

    inputs: Sequence[Input]
    number: int = 0
    run_as: int = 0
    rows: Sequence[int] = ()

    @property
    def count(self) -> int:
        """The number of rows."""
        return sum(self.rows) or len(self.inputs)


@dataclass(slots=True)
class CancelPredict:
    """No client waits for the answer to the `Predict` of this number any more."""

    number: int


@dataclass(slots=True)
class PiecesRead:
    """Further ``count`` bytes of the pieces of an answer are read, or dropped.

    Sent for a part of the window at a time, and to asynchronous handlers only. The number is that
    of the `Predict`.
    """

    number: int
    count: int


@dataclass(slots=True)
class EndSequence:
    """A sequence has ended; sent when its requests are answered, if the handler is called."""

    sequence_id: str
    reason: str
    number: int = 0


@dataclass(slots=True)
class Profile:
    """Run one batch of samples, to measure the cost of these batch sizes.

    One message is one run, so that requests can be served in between. With ``sizes`` profiling
    starts; without, it continues. It has ended when all sizes have their costs or there is a note.
    ``seconds`` is the time for all runs; a run expected to take ``longest`` is not started.
    """

    sizes: list[int]
    seconds: float
    longest: float
    number: int = 0


@dataclass(slots=True)
class Compare:
    """Run one batch of samples, to compare the answers to batches with those to single requests.

    One message is one run, as with `Profile`, and the first has the ``sizes`` of the batches. Above
    3, those whose run is expected to take ``longest`` are replaced by smaller ones. The other
    attributes are as in `Load` and `Trials`; only differences are a failure.
    """

    sizes: list[int]
    compiled_sizes: list[int]
    seconds: float
    longest: float
    tolerance: float
    number: int = 0


@dataclass(slots=True)
class Compared:
    """The result of comparing, once it has ended: a `profiling.validation.Validation`, else None.

    ``poisoned`` is as in `Reply`.
    """

    validation: dict[str, Any] | None
    poisoned: str = ""
    number: int = 0


@dataclass(slots=True)
class SetThreads:
    """Compute with ``count`` threads if ``before`` are in use; sent between batches."""

    before: int
    count: int
    number: int = 0


@dataclass(slots=True)
class ThreadsSet:
    """The number of threads in use after a `SetThreads`."""

    count: int
    number: int = 0


@dataclass(slots=True)
class Prediction:
    """One result for one job; ``reason`` is the phrase of its status line, often empty."""

    body: Buffer
    status: int = 200
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class SpanRecord(NamedTuple):
    """A span of a handler (`backend.spans`); moments are seconds on the monotonic clock.

    ``request`` is the span id in the request's header, ``error`` the exception that ended the span.
    """

    request: str
    span_id: str
    parent_id: str
    name: str
    started: float
    ended: float
    attributes: dict[str, Any]
    error: str


@dataclass(slots=True)
class Reply:
    """The answer to a batch, or to the end of a sequence.

    Attributes:
        code: A code other than 200 holds for the whole batch; there are then no predictions, and
            ``message`` is the error for the clients.
        handler_started: When the handler was called, in seconds on the monotonic clock, which is
            that of the frontend, too; 0 if it has not finished.
        metrics: Rows of `backend.metrics`, reported since the last reply.
        poisoned: Why the process, though alive, cannot serve any more (`backend.errors`). Such a
            reply is the last one: the process is replaced.
        suspect: The place of the input that the failure may be about; -1 if unknown.
        raised_at: Where the exception was raised (`backend.suspects`).
        rows: The number of rows that each prediction is for, as of `Predict`; empty for one each. A
            block has one prediction for all its rows, or one for each.
        lengths: Pairs of place and length of some rows (`backend.input_lengths`).
        length_seconds: How long that took, which is not a cost of the batch.
        cause: The exception of a handler that failed, for operators.
        spans: Those of the handler, of requests that are sampled.
        paused_ms: How long the handler waited between its stages (`backend.pipeline`), which
            ``handler_ms`` does not contain.
    """

    code: int = 200
    message: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    metrics: list[list[Any]] = field(default_factory=list)
    handler_ms: float = 0.0
    handler_started: float = 0.0
    number: int = 0
    poisoned: str = ""
    suspect: int = -1
    raised_at: str = ""
    rows: tuple[int, ...] = ()
    lengths: tuple[tuple[int, float], ...] = ()
    length_seconds: float = 0.0
    cause: str = ""
    spans: tuple[SpanRecord, ...] = ()
    paused_ms: float = 0.0


@dataclass(slots=True)
class Piece:
    """A part of the answers to a batch, whose other parts follow.

    ``places`` are the inputs of the batch that the predictions belong to. A code other than 200
    ends all answers of the batch with the error ``message``.
    """

    predictions: list[Prediction] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    code: int = 200
    message: str = ""
    number: int = 0


@dataclass(slots=True)
class NextBatch:
    """The worker, whose stages overlap, can take another batch behind the one of this number."""

    number: int = 0


@dataclass(slots=True)
class Call:
    """A handler calls a model (`Context.infer`), on behalf of the `Predict` of number ``batch``.

    An empty ``version`` is the default one. ``timeout`` is in seconds, None for what the request
    has left.
    """

    number: int
    batch: int
    model: str
    version: str
    timeout: float | None
    headers: dict[str, str]
    parts: list[Part]


@dataclass(slots=True)
class CancelCall:
    """The handler has stopped waiting for this call."""

    number: int


@dataclass(slots=True)
class CallReply:
    """The answer to a `Call`: a prediction, or an error as in bodies of HTTP responses.

    ``retry_after`` is in seconds, None if unknown.
    """

    number: int
    prediction: Prediction | None
    status: int = 200
    type: str = ""
    message: str = ""
    retry_after: int | None = None


#: What a worker sends about a message that has a number.
WorkerAnswer = Reply | Piece | NextBatch | Profiled | Compared | ThreadsSet
Message = (
    Load
    | LoadStarted
    | Loaded
    | LoadFailure
    | Predict
    | CancelPredict
    | PiecesRead
    | EndSequence
    | Profile
    | Compare
    | SetThreads
    | WorkerAnswer
    | Call
    | CancelCall
    | CallReply
)
