"""The messages between the frontend and a worker; `backend.framing` turns them to bytes and back.

No I/O, no clock, and nothing but data: both sides stand on this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: What a handler takes a batch through: preprocess, inference, postprocess.
STAGES = 3
#: Response header that tells whether more pieces of an answer follow; TorchServe's clients read it.
STREAM_NEXT = "ts_stream_next"

Buffer = bytes | bytearray | memoryview


class ProtocolError(Exception):
    """The peer sent what no frame can be; says what was found and what was due."""


@dataclass(frozen=True)
class Load:
    """Frontend to worker: become this model. Answered by a `Reply` without predictions.

    ``envelope`` names what is wrapped around the handler's entry point, if anything is. With
    ``asynchronous`` the handler is a coroutine, and batches are sent without waiting for replies.

    ``profiled_sizes`` are the batch sizes whose cost the worker measures once the model is loaded,
    within about ``profiling_seconds``; none, nothing is measured. ``sample_input`` is the file in
    the model directory that such a batch is made of; empty, the handler is asked for a sample.
    ``compiled_sizes`` are the only sizes that batches will have, none for any size up to
    ``batch_size``.

    ``overlap_stages`` says whether the stages of successive batches overlap; it is an error where
    they cannot.

    ``declared_metrics`` are those of metrics.yaml, as rows for `backend.metrics`.
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
    overlap_stages: bool = False
    declared_metrics: list[list[Any]] = field(default_factory=list)


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
    """What one job carries: its request id, its headers (client's case) and its parts."""

    id: str
    headers: dict[str, str]
    parts: list[Part]


@dataclass(slots=True)
class Predict:
    """Frontend to worker: one batch. Answered by a `Reply` with as many predictions, in order.

    Any number of replies with ``more`` may come before it. ``number`` comes back in all of them:
    what answers another batch (a handler that forked, say) must never reach the clients of this
    one. ``run_as``, where it is more than there are inputs, is how many rows the handler gets: the
    worker repeats the last input, and keeps what comes of the repeats to itself.
    """

    inputs: Sequence[Input]
    number: int = 0
    run_as: int = 0


@dataclass(slots=True)
class Prediction:
    """One result for one job; ``reason`` is the phrase of its status line, often empty."""

    body: Buffer
    status: int = 200
    reason: str = ""
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Reply:
    """Worker to frontend: what became of a `Load` or a `Predict`.

    A ``code`` other than 200 speaks for the whole batch; ``predictions`` is then empty and
    ``message`` is what the clients are told. ``metrics`` are rows of `backend.metrics`, reported
    since the last reply; ``handler_ms`` is how long the handler took.

    ``poisoned`` says why the process can serve no more though it lives, empty while it can: this
    reply is its last, and the process is replaced (`backend.errors`).

    With ``more`` it is a piece of the answer: ``places`` tells which inputs of the batch its
    predictions belong to, and another reply follows.

    The rest speaks of a `Load`. ``permanent``: the next try would fail for the same reason.
    ``costs`` are the sizes that were profiled, smallest first, as rows ``[size, seconds,
    peak_bytes]``: what a batch of that size took, and how much memory beyond that of the idle
    model. ``profiling_note`` is a sentence that says why there are no more of them, empty when all
    were profiled; ``too_large`` is the size that memory does not suffice for, 0 when none was met.
    ``overlaps``: stages overlap. With each batch there then comes a piece without predictions, at
    the moment at which another batch can be of use (`asks`).
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
    overlaps: bool = False
    poisoned: str = ""

    @property
    def asks(self) -> bool:
        """Whether it says no more than that the worker could do with another batch."""
        return self.more and self.code == 200 and not self.places


Message = Load | Predict | Reply
