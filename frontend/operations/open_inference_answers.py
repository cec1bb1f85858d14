"""Reads the answers of workers to inference requests of the Open Inference Protocol."""

import json
from dataclasses import dataclass, field
from typing import Any

from marserve.backend.protocol import Buffer, Prediction
from marserve.backend.tensors.datatypes import BYTES, write_elements, write_numbers
from marserve.backend.tensors.rows import Output
from marserve.backend.tensors.wire import LENGTH_HEADER, SIZE
from marserve.frontend.errors import PredictionFailed

Json = dict[str, Any]

_LENGTH_HEADER = LENGTH_HEADER.lower()
_MAX_REASON = 4096  # bytes of a handler's error that are read


class UnreadableAnswer(PredictionFailed, status=500):
    """The answer of a handler does not fit the messages of the protocol."""

    def __init__(self) -> None:
        super().__init__("The model's answer is not one of the Open Inference Protocol.")


@dataclass
class InferAnswer:
    """An answer; members that the model did not set are empty."""

    id: str = ""
    model_name: str = ""
    model_version: str = ""
    parameters: Json = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The bytes of its outputs."""
        return sum(len(output.buffer) for output in self.outputs)


def answer_of(prediction: Prediction) -> InferAnswer:
    """Read the answer to an `input_of` whose head asks for ``binary_data_output``.

    Raises PredictionFailed if the handler answered with an error, or unreadably.
    """
    check_status(prediction)
    headers = {name.lower(): value for name, value in prediction.headers.items()}
    return _read_answer(prediction.body, headers.get(_LENGTH_HEADER, len(prediction.body)))


def check_status(prediction: Prediction) -> None:
    """Raise PredictionFailed if the handler answered with an error."""
    if prediction.status >= 400:
        raise PredictionFailed(_sentence_of(prediction), status=prediction.status)


def piece_of(body: Buffer) -> InferAnswer:
    """Read a piece of a streamed answer; it has no headers, and its JSON is one line."""
    body = bytes(body)
    try:
        return _read_answer(body, body.index(b"\n") + 1)
    except (
        ValueError,
        UnreadableAnswer,
    ):  # from a handler in an envelope, which does not see pieces
        buffer = write_elements([body])
        return InferAnswer(outputs=[Output("output-0", BYTES, [1], buffer)])


def _read_answer(body: Buffer, head_bytes: str | int) -> InferAnswer:
    view = memoryview(body)
    try:
        end = int(head_bytes)
        document = json.loads(bytes(view[:end]))
        outputs = []
        for described in document["outputs"]:
            parameters = dict(described.get("parameters") or {})
            shape = list(map(int, described["shape"]))
            if (size := parameters.pop(SIZE, None)) is None:
                buffer: Buffer = _written(described)
            else:
                buffer, end = view[end : end + size], end + size
            name, datatype = str(described["name"]), str(described["datatype"])
            outputs.append(Output(name, datatype, shape, buffer, parameters))
        texts = {
            name: str(document.get(name) or "") for name in ("id", "model_name", "model_version")
        }
        return InferAnswer(
            **texts, parameters=dict(document.get("parameters") or {}), outputs=outputs
        )
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        raise UnreadableAnswer from error


def _written(described: Json) -> bytes:
    datatype, values = described["datatype"], described["data"]
    if datatype == BYTES:
        texts = (value if isinstance(value, str) else json.dumps(value) for value in values)
        return write_elements(text.encode() for text in texts)
    return write_numbers(datatype, values)


def _sentence_of(prediction: Prediction) -> str:
    """Return the error of a handler: the message in its JSON, or the whole text."""
    text = bytes(prediction.body[:_MAX_REASON]).decode("utf-8", "replace")
    try:
        document = json.loads(text)
        found = document.get("error") or document.get("message")
    except (ValueError, AttributeError, RecursionError):
        found = None
    return str(found or text.strip() or prediction.reason or f"Status {prediction.status}")
