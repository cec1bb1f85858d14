"""Tensors in the messages of the Open Inference Protocol, read and written.

A tensor has raw bytes, or typed contents: values in a field that depends on its datatype. An answer
has the form of its request. FP16 and BF16 have no typed field, so an answer with one of them is raw
as a whole. One step reads or writes some thousand values.
"""

from collections.abc import Mapping
from typing import Any

from marserve.backend.protocol import Buffer
from marserve.backend.tensors.datatypes import (
    BYTES,
    ITEM_BYTES,
    UnusableTensor,
    read_elements,
    read_numbers,
    write_elements,
    write_numbers,
)
from marserve.backend.tensors.rows import Output
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.errors import BadRequest
from marserve.frontend.grpc.messages import Message
from marserve.frontend.operations.open_inference import InferRequest
from marserve.frontend.operations.open_inference_answers import InferAnswer

_FIELDS = (
    {"BOOL": "bool_contents", "INT64": "int64_contents", "UINT64": "uint64_contents"}
    | dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents")
    | dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents")
    | {"FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents"}
)
_VALUES = 8192  # that one step reads
_MAX_NAME = 80
# Of one request; one step converts them to JSON. Two bytes of a message can be a tensor.
_MAX_MEMBERS = 10_000
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1


def parameters_of(parameters: Mapping[str, Message]) -> dict[str, Any]:
    """Return parameters as JSON values, by name; those without a value are left out."""
    found = {}
    for name, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is not None:
            found[name] = getattr(parameter, choice)
    return found


def read_request(message: Message) -> Steps[InferRequest]:
    """Read a ``ModelInferRequest``, or raise BadRequest."""
    _check_members(message)
    raw = message.raw_input_contents
    if not message.inputs:
        raise BadRequest("A request needs at least one input.")
    if raw and len(raw) != len(message.inputs):
        raise BadRequest(
            f"There are {len(message.inputs)} inputs, and raw_input_contents has {len(raw)}."
        )
    described, buffers = [], []
    for place, tensor in enumerate(message.inputs):
        entry = {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
            "parameters": parameters_of(tensor.parameters),
        }
        if not raw:
            buffers.append((yield from _typed_contents(tensor)))
        elif tensor.HasField("contents"):
            raise BadRequest(
                f"Input {tensor.name[:_MAX_NAME]!r} has contents and raw_input_contents."
            )
        else:
            buffers.append(raw[place])
        described.append({name: value for name, value in entry.items() if value != {}})
        yield 0
    head: dict[str, Any] = {"id": message.id, "model_name": message.model_name, "inputs": described}
    if message.outputs:
        head["outputs"] = [_requested(output) for output in message.outputs]
    if parameters := parameters_of(message.parameters):
        head["parameters"] = parameters
    return InferRequest(head, buffers, is_typed=not raw, wants_bytes=True)


def _check_members(message: Message) -> None:
    members = [message.inputs, message.outputs, message.parameters]
    if sum(map(len, members)) <= _MAX_MEMBERS:
        members += [tensor.parameters for tensor in (*message.inputs, *message.outputs)]
        members += [tensor.shape for tensor in message.inputs]
    if sum(map(len, members)) > _MAX_MEMBERS:
        raise BadRequest(
            f"The request has more than {_MAX_MEMBERS} tensors, dimensions and parameters."
        )


def write_answer(answer: InferAnswer, message: Message, *, is_typed: bool) -> Steps[None]:
    """Write an answer into a ``ModelInferResponse``."""
    message.id = answer.id
    message.model_name = answer.model_name
    message.model_version = answer.model_version
    _write_parameters(message.parameters, answer.parameters)
    is_typed = is_typed and all(output.datatype in _FIELDS for output in answer.outputs)
    for output in answer.outputs:
        written = message.outputs.add(name=output.name, datatype=output.datatype)
        written.shape.extend(output.shape)
        _write_parameters(written.parameters, output.parameters)
        if is_typed:
            yield from _write_contents(written.contents, output)
        else:
            message.raw_output_contents.append(bytes(output.buffer))
        yield len(output.buffer)


def _typed_contents(tensor: Message) -> Steps[Buffer]:
    datatype, name = tensor.datatype, tensor.name[:_MAX_NAME]
    field = _FIELDS.get(datatype)
    if field is None:
        if datatype in ITEM_BYTES:
            raise BadRequest(f"Input {name!r}: {datatype} can only be in raw_input_contents.")
        return b""  # unknown datatype; a later check refuses it
    values = getattr(tensor.contents, field)
    pieces = []
    for start in range(0, len(values), _VALUES):
        some = values[start : start + _VALUES]
        try:
            if datatype == BYTES:
                pieces.append(write_elements(some))
            else:
                pieces.append(write_numbers(datatype, some))
        except UnusableTensor as error:
            raise BadRequest(f"Input {name!r} {error}.") from error
        yield len(pieces[-1])
    return (yield from joined(pieces))


def _write_contents(contents: Message, output: Output) -> Steps[None]:
    values = getattr(contents, _FIELDS[output.datatype])
    if output.datatype == BYTES:
        for place, element in enumerate(read_elements(output.buffer), start=1):
            values.append(element)
            if place % _VALUES == 0:
                yield 0
        return
    view, size = memoryview(output.buffer), ITEM_BYTES[output.datatype] * _VALUES
    for start in range(0, len(view), size):
        values.extend(read_numbers(output.datatype, view[start : start + size]))
        yield 0


def _requested(output: Message) -> dict[str, Any]:
    """Return a requested output without ``binary_data``, which has no effect here."""
    parameters = parameters_of(output.parameters)
    parameters.pop("binary_data", None)
    return {"name": output.name} | ({"parameters": parameters} if parameters else {})


def _write_parameters(written: Any, parameters: Mapping[str, Any]) -> None:
    for name, value in parameters.items():
        if isinstance(value, bool):
            written[name].bool_param = value
        elif isinstance(value, int) and _MIN_INT64 <= value <= _MAX_INT64:
            written[name].int64_param = value
        elif isinstance(value, float):
            written[name].double_param = value
        else:
            written[name].string_param = str(value)
