"""The messages between the frontend and a worker; `backend.framing` turns them to bytes and back.

Only data classes, without I/O; both sides import this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: What a handler takes a batch through: preprocess, inference, postprocess.
STAGES = 3
#: Response header that tells whether more pieces of an answer follow; TorchServe's clients read it.
STREAM_NEXT = "ts_stream_next"

#: Type of a part that is a request of the Open Inference Protocol with its tensors as bytes; see
#: `backend.tensor_requests`.
TENSORS_TYPE = "application/vnd.marserve.tensors"

Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """The peer broke the protocol; the text says what was found and what was expected."""


@dataclass(frozen=True)
class Load:
    """Frontend to worker: load this model. Answered by a `Reply` without predictions.

    An empty reply with ``more`` precedes it: the process has started, and loading begins.

    ``envelope`` names the request envelope around the handler's entry point; empty for none. With
    ``asynchronous`` the handler is a coroutine, and batches are sent without waiting for replies.

    ``profiled_sizes`` are the batch sizes whose cost the worker measures once the model is loaded,
    within about ``profiling_seconds``; with none, nothing is measured. ``sample_input`` is the file
    in the model directory from which such batches are made; if empty, the handler is asked for a
    sample. ``compiled_sizes`` are the only sizes that batches will have; if empty, they have any
    size up to ``batch_size``.

    ``tried_threads`` are numbers of torch's threads, rising; the last is what it was started with,
    and the worker takes a smaller one if that is as fast for the sample. With none it tries none.

    ``overlap_stages`` asks that the stages of successive batches overlap; loading fails if the
    handler cannot do that.

    ``validated_sizes`` are the batch sizes at which answers are compared with those of single
    requests, within about ``validation_seconds``; with none, nothing is compared. Loading fails if
    they differ, or cannot be compared, and it ``must_validate``. Numbers may differ by
    ``tolerance``; 0 is what is usual for the model's precision. ``more_samples`` are further files
    beside ``sample_input``.

    ``declared_metrics`` are those of metrics.yaml, as rows for `backend.metrics`.
    ``max_call_bytes`` is the largest body of a `Call`.

    ``batch_dims`` are the dimensions along which the tensors of a request, and those of its answer,
    have a row for each row of the batch. ``stack_inputs`` is the library of whose arrays the
    handler gets one for each input, with all rows of the batch (`backend.stacking`); empty for a
    list with a dict for each row.

    ``sequence_headers`` are set for stateful models: the names of the headers that give the id of a
    request's sequence, mark its first request, and its end.
    """

    model_name: str
    model_dir: str
    handler: str
    batch_size: int
    gpu_id: int | None
    limit_max_image_pixels: bool
    decode_input_request: bool
    max_response_bytes: int
    server_version: str
    envelope: str = ""
    asynchronous: bool = False
    profiled_sizes: list[int] = field(default_factory=list)
    profiling_seconds: float = 2.0
    sample_input: str = ""
    compiled_sizes: list[int] = field(default_factory=list)
    tried_threads: list[int] = field(default_factory=list)
    overlap_stages: bool = False
    declared_metrics: list[list[Any]] = field(default_factory=list)
    max_call_bytes: int = 0
    sequence_headers: list[str] = field(default_factory=list)
    batch_dims: list[int] = field(default_factory=lambda: [0, 0])
    stack_inputs: str = ""
    more_samples: list[str] = field(default_factory=list)
    validated_sizes: list[int] = field(default_factory=list)
    must_validate: bool = False
    validation_seconds: float = 60.0
    tolerance: float = 0.0


@dataclass(slots=True)
class Part:
    """One named field of an input, e.g. a form field; a plain request body is named ``body``.

    ``content_type`` is a media type without parameters, empty for none.
    """

    name: str
    content_type: str
    body: Buffer


@dataclass(slots=True)
class Input:
    """The input of one job: its request id, its headers (in the client's case) and its parts."""

    id: str
    headers: dict[str, str]
    parts: list[Part]


@dataclass(slots=True)
class Predict:
    """Frontend to worker: one batch. Answered by a `Reply` with as many predictions, in order.

    Any number of replies with ``more`` may come before it. All of them have the same ``number``, so
    that a reply to another batch (of a handler that forked, say) never reaches the clients of this
    one. If ``run_as`` is larger than the number of inputs, the handler gets that many rows: the
    worker repeats the last input, and drops the results of the repeats.

    ``rows`` are how many rows of the batch each input is; empty for one each. An input that is more
    than one is a block: rows of one request in tensors, which follow each other in the batch
    (`backend.row_blocks`).
    """

    inputs: Sequence[Input]
    number: int = 0
    run_as: int = 0
    rows: Sequence[int] = ()

    @property
    def count(self) -> int:
        """How many rows it has."""
        return sum(self.rows) or len(self.inputs)


@dataclass(slots=True)
class EndSequence:
    """Frontend to worker: a sequence is over, for this reason. Answered by an empty `Reply`.

    It comes when the requests of the sequence are answered, and before those of a new one with the
    same id. Sent only if the handler wants to know (`Reply.ends_sequences`).
    """

    sequence_id: str
    reason: str
    number: int = 0


@dataclass(slots=True)
class Profile:
    """Frontend to worker: run one batch of samples, to measure what batches of these sizes cost.

    Answered by a `Reply` with the ``costs`` that are complete so far. Each such message is one run,
    so that the worker can be needed for requests in between. With ``sizes`` profiling begins anew;
    without, it goes on. It is over when all sizes have their costs, or there is a
    ``profiling_note``. For ``seconds`` see `Load.profiling_seconds`; no batch is run that would
    take longer than ``longest`` seconds, as far as known.
    """

    sizes: list[int]
    seconds: float
    longest: float
    number: int = 0


@dataclass(slots=True)
class SetThreads:
    """Frontend to worker: compute with ``count`` threads, if they are still the ``before`` given.

    Sent between batches, when the worker's share of the cores has changed; answered by a `Reply`
    that tells how many there are now.
    """

    before: int
    count: int
    number: int = 0


@dataclass(slots=True)
class Prediction:
    """One result for one job; ``reason`` is the phrase of its status line, often empty."""

    body: Buffer
    status: int = 200
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Reply:
    """Worker to frontend: the answer to a `Load`, a `Predict`, an `EndSequence` or a `Profile`.

    A ``code`` other than 200 holds for the whole batch; ``predictions`` is then empty and
    ``message`` is the error for the clients. ``metrics`` are rows of `backend.metrics`, reported
    since the last reply; ``handler_ms`` is how long the handler took. ``rows`` are the rows of the
    batch that each of the predictions is for, as of `Predict`; a block may have one for all.

    ``poisoned`` is the reason why the process, though alive, can serve no more; empty while it can.
    Such a reply is the last one, and the process is replaced (`backend.errors`).

    ``suspects`` are the inputs that a failure may be about, as far as the traceback tells, and
    ``raised_at`` is where it was raised (`backend.suspects`).

    With ``more`` it is a piece of the answer: ``places`` are the inputs of the batch to which its
    predictions belong, and another reply follows.

    ``lengths`` are what the handler says of the lengths of some inputs: pairs of place and length,
    `input_lengths.FAILED` where it could not tell. ``length_seconds`` is how long it was asked,
    which is no cost of the batch.

    The other fields belong to a `Load`. ``permanent``: the next try would fail for the same reason.
    ``costs`` are the profiled sizes, smallest first, as rows ``[size, seconds, peak_bytes]``: the
    time that a batch of that size took, and its memory beyond that of the idle model.
    ``profiling_note`` is a sentence on why not all sizes were profiled, else empty; ``too_large``
    is the size that ran out of memory, 0 for none. ``overlaps``: stages overlap, and so many
    batches are in the model at a time; 0 if they do not. Where they do, each batch has a piece
    without predictions, sent when the worker can take another batch (`asks`).
    ``ends_sequences``: the handler wants to know which sequences are over. ``tensors`` are those
    that the handler declares (`backend.tensors.is_declaration`). ``compiled`` is what
    `Context.describe_compiled` says, empty where there is nothing to say.
    ``threads`` are how many torch computes with, and where the worker has chosen them itself, why;
    empty if torch is not loaded. ``validation`` is what came of ``validated_sizes``
    (`profiling.validation.Validation`); empty where nothing was compared.
    """

    code: int = 200
    message: str = ""
    predictions: list[Prediction] = field(default_factory=list)
    metrics: list[list[Any]] = field(default_factory=list)
    handler_ms: float = 0.0
    number: int = 0
    more: bool = False
    places: list[int] = field(default_factory=list)
    permanent: bool = False
    costs: list[list[Any]] = field(default_factory=list)
    profiling_note: str = ""
    too_large: int = 0
    overlaps: int = 0
    poisoned: str = ""
    suspects: list[int] = field(default_factory=list)
    raised_at: str = ""
    ends_sequences: bool = False
    tensors: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    threads: list[Any] = field(default_factory=list)
    lengths: list[list[float]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    validation: dict[str, Any] = field(default_factory=dict)
    length_seconds: float = 0.0

    @property
    def asks(self) -> bool:
        """Whether it only asks for another batch."""
        return self.more and self.code == 200 and not self.places


@dataclass(slots=True)
class Call:
    """Worker to frontend: a handler calls a model (`Context.infer`). Answered by a `CallReply`.

    ``number`` is its own, and ``batch`` that of the `Predict` on whose behalf it is made. An empty
    ``version`` is the default one. ``timeout`` is in seconds, None for what the request has left.
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
    """Worker to frontend: the handler does not wait for this call any more; no answer follows."""

    number: int


@dataclass(slots=True)
class CallReply:
    """Frontend to worker: the answer to a `Call`, or, without a prediction, why there is none.

    ``type`` is the word that clients of the server get in such an error's body; ``retry_after`` is
    in seconds, None where nothing is known.
    """

    number: int
    prediction: Prediction | None
    status: int = 200
    type: str = ""
    message: str = ""
    retry_after: int | None = None


Message = (
    Load | Predict | EndSequence | Profile | SetThreads | Reply | Call | CancelCall | CallReply
)
