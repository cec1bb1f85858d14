"""Inference by the Open Inference Protocol, independent of the transport.

A transport reads an `InferRequest`: the JSON of the request without its tensors, and the bytes of
each tensor. They are checked and become one part in the protocol's binary form: a line of JSON, and
the bytes behind it. The values of tensors are not read in this process, except the typed contents
of gRPC clients. The worker reads a part as follows:

    service_envelope = kservev2       the envelope reads it, as it reads a body of REST
    any other handler                 the JSON document that a client could have sent instead
                                      (`backend.tensors`), and its answer becomes tensors

To convert a tensor of 1 MB to lists or JSON takes 10 to 100 ms, which in this process would delay
all models. The copy of the bytes takes 0.1 ms.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marserve.backend.json_text import KEEP
from marserve.backend.protocol import TENSORS_TYPE, Buffer, Input, Part
from marserve.backend.tensors.checks import (
    check_declared,
    check_request,
    item_bytes,
    resolved_shape,
)
from marserve.backend.tensors.datatypes import (
    BYTES,
    UnusableTensor,
    element_count,
    read_elements,
)
from marserve.backend.tensors.wire import (
    ARRAYS,
    ENCODING,
    FORMAT_HEADER,
    IN_BODY,
    LENGTH_HEADER,
    SIZE,
    buffers_behind,
    pack_request,
)
from marserve.frontend.aio.json_items import text_of
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.errors import BadRequest
from marserve.frontend.operations.json_tensors import AnswerBody, as_bytes, read_document
from marserve.frontend.operations.tensor_rows import TensorRows, columns_of, row_count
from marserve.frontend.serving.model_version import ModelVersion

Json = dict[str, Any]

_ENVELOPE = "kservev2"  # reads the binary form itself
_BODY = "body"
_MAX_NAME = 80  # characters of a name in a message
_LENGTH_HEADER = LENGTH_HEADER.lower()
_LENGTH = re.compile("[0-9]{1,18}")
_MAX_HEAD = 1 << 16  # bytes of JSON, which is parsed in one step
_ELEMENTS = 4096  # of BYTES that one step checks
# Parameters of extensions that are not supported.
_REFUSED = {
    "shared_memory_region": "Shared memory is not supported; send the tensors in the request.",
    "classification": "The classification extension is not supported; request the tensor.",
}


@dataclass
class InferRequest:
    """A request, as its transport has read it."""

    head: Json  # its inputs have no data, unless a buffer is None
    buffers: Sequence[Buffer | None]  # the bytes of each input, in order
    is_typed: bool = False  # whether the client sent typed values, and receives typed values
    wants_bytes: bool = False  # whether all outputs are bytes, independent of the head


@dataclass(frozen=True)
class AskedModel:
    """The properties of a model that decide how its request is read."""

    name: str
    version: str
    envelope: str = ""
    is_declared: bool = False  # whether it declares its tensors
    inputs: Sequence[Json] = ()  # those that it declares
    wants_arrays: bool = False  # whether its handler gets tensors of bytes as arrays
    takes_bytes: bool = False  # whether tensors in JSON are converted to bytes, too
    dims: tuple[int, int] | None = None  # that count the rows; None if requests are not cut
    max_rows: int = 0  # the largest number of rows
    json_nan: str = KEEP  # how NaN and infinities are written in JSON


def asked_model(model: ModelVersion) -> AskedModel:
    """Return the properties of a model."""
    tensors = model.tensors
    envelope, arrays = model.manifest.envelope, bool(tensors.get("arrays"))
    inputs = tensors.get("inputs", ())
    asked = AskedModel(model.name, model.version, envelope, bool(tensors), inputs, arrays)
    settings = model.settings
    if envelope or not (settings.batching.splits_lists or settings.stack_inputs):
        return asked
    dims = settings.batching.batch_dims if settings.batching.splits_lists else None
    return replace(
        asked, takes_bytes=True, dims=dims, max_rows=model.max_rows, json_nan=model.json_nan
    )


def input_of(
    request: InferRequest, id_: str, headers: Mapping[str, str], model: AskedModel
) -> Steps[Input | TensorRows]:
    """Check a request, whose head is changed, and return the model's input, or those of its rows.

    Raises BadRequest if a tensor is unusable, or an extension is not supported.
    """
    head, buffers = request.head, list(request.buffers)
    _refuse_extensions(head)
    yield from _prepare_inputs(head["inputs"], buffers, request, model)
    for output in head.get("outputs") or ():
        _refuse_extensions(output)
    parameters = head.get("parameters") or {}
    if request.wants_bytes:
        parameters = {**parameters, "binary_data_output": True}
    if model.envelope == _ENVELOPE:
        pieces = pack_request({**head, "parameters": parameters}, buffers)
        headers = {**headers, LENGTH_HEADER: str(len(pieces[0]))}
        return Input(id_, headers, [(yield from _body(pieces, "application/octet-stream"))])
    form = {"id": head.get("id") or id_, "outputs": head.get("outputs"), "parameters": parameters}
    if model.dims and (count := row_count(head["inputs"], model.dims[0])) > 1:
        in_bytes = [buffer for buffer in buffers if buffer is not None]  # all of them
        return (yield from _rows(head, in_bytes, count, id_, headers, model, form))
    headers = {**headers, FORMAT_HEADER: _format(model, form)}
    pieces = pack_request({**head, ARRAYS: model.wants_arrays}, buffers)
    return Input(id_, headers, [(yield from _body(pieces, TENSORS_TYPE))])


def _prepare_inputs(
    inputs: Sequence[Json],
    buffers: list[Buffer | None],
    request: InferRequest,
    model: AskedModel,
) -> Steps[None]:
    shapes = []
    for place, (tensor, buffer) in enumerate(zip(inputs, buffers, strict=True)):
        _refuse_extensions(tensor)
        if buffer is None and model.takes_bytes:
            buffers[place] = buffer = yield from as_bytes(tensor)
        shapes.append(tensor["shape"])
        if buffer is None:
            continue
        shapes[-1] = shape = yield from _check(tensor, buffer)
        if model.takes_bytes:
            tensor["shape"] = shape
        parameters = {**tensor.pop("parameters", {}), SIZE: len(buffer)}
        if request.is_typed and tensor["datatype"] == BYTES:
            parameters[ENCODING] = "base64"  # as TorchServe's handlers expect it
        tensor["parameters"] = parameters
    try:
        check_declared(inputs, shapes, model.inputs, model.dims and model.dims[0])
    except UnusableTensor as error:
        raise BadRequest(str(error)) from error


def _body(pieces: Sequence[Buffer], media_type: str) -> Steps[Part]:
    yield sum(map(len, pieces))
    return Part(_BODY, media_type, (yield from joined(pieces)))


def _rows(
    head: Json,
    buffers: Sequence[Buffer],
    count: int,
    id_: str,
    headers: Mapping[str, str],
    model: AskedModel,
    form: Json,
) -> Steps[TensorRows]:
    """Each row is answered in bytes, until they are joined."""
    assert model.dims is not None
    members = {"id": form["id"], "model_name": model.name, "model_version": model.version}
    body = AnswerBody({**head, "parameters": form["parameters"]}, members, model.json_nan)
    outputs = [{"name": output["name"]} for output in head.get("outputs") or ()]
    in_bytes = {**form, "outputs": outputs, "parameters": {"binary_data_output": True}}
    # One more than accepted, so that the request is refused.
    max_rows = model.max_rows + 1
    columns = yield from columns_of(head["inputs"], buffers, count, model.dims[0], max_rows)
    for_worker = {**head, ARRAYS: model.wants_arrays}
    headers = {**headers, FORMAT_HEADER: _format(model, in_bytes)}
    rows = TensorRows(id_, headers, for_worker, columns, count, model.dims, body)
    yield from rows.cut(max_rows)
    return rows


def _format(model: AskedModel, form: Json) -> str:
    return json.dumps({"model_name": model.name, "model_version": model.version, **form})


def input_of_body(input_: Input, model: AskedModel) -> Steps[Input | TensorRows]:
    """Return the model's input of a request over HTTP.

    A request with tensors behind its JSON is read as any other. A request in JSON only is passed on
    unchanged, as in TorchServe; but a model that declares tensors gets it as a document of any
    type, and its answer becomes one. Where tensors are cut or stacked, all become bytes. Models
    in an envelope get the request unchanged.

    Raises:
        BadRequest: The body is malformed, a tensor is unusable, or an extension is not supported.
    """
    if model.envelope or [part.name for part in input_.parts] != [_BODY]:
        return input_
    for name, value in input_.headers.items():
        if name.lower() == _LENGTH_HEADER:
            request = _read_body(input_.parts[0].body, value)
            return (yield from input_of(request, input_.id, input_.headers, model))
    if model.takes_bytes:
        head = yield from read_document(text_of(input_.parts[0].body))
        if head is not None:
            request = InferRequest(head, [None] * len(head["inputs"]))
            return (yield from input_of(request, input_.id, input_.headers, model))
    if model.is_declared:
        input_.parts[0].content_type = "application/json"
        input_.headers[FORMAT_HEADER] = _format(model, {"id": input_.id, IN_BODY: True})
    return input_


def _read_body(body: Buffer, length: str) -> InferRequest:
    if not _LENGTH.fullmatch(length) or int(length) > len(body):
        raise BadRequest(f"{LENGTH_HEADER} is {length[:20]!r}; the body has {len(body)} bytes.")
    at = int(length)
    if at > _MAX_HEAD:
        raise BadRequest(
            f"{LENGTH_HEADER} is {length}: beside tensors as bytes there may be {_MAX_HEAD} bytes "
            "of JSON. Send the others as bytes, too."
        )
    try:
        head = json.loads(bytes(body[:at]))
        check_request(head)
        return InferRequest(head, buffers_behind(head["inputs"], body, at))
    except UnusableTensor as error:
        raise BadRequest(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The first {at} bytes are not JSON: {error}") from error


def _check(tensor: Json, buffer: Buffer) -> Steps[list[int]]:
    """Check the size of an input against its datatype and shape, and return its shape."""
    name, datatype, shape = tensor["name"][:_MAX_NAME], tensor["datatype"], tensor["shape"]
    try:
        if datatype == BYTES:
            found, rest = (yield from _count_elements(buffer)), 0
        else:
            found, rest = divmod(len(buffer), item_bytes(datatype))
        resolved = resolved_shape(shape, found)
        count = element_count(resolved)
    except UnusableTensor as error:
        raise BadRequest(f"Input {name!r} {error}.") from error
    if rest or found != count:
        there = f"{found} elements" if datatype == BYTES else f"{len(buffer)} bytes"
        unit = "elements" if datatype == BYTES else datatype
        raise BadRequest(f"Input {name!r} has {there}; its shape {shape} wants {count} {unit}.")
    return resolved


def _count_elements(buffer: Buffer) -> Steps[int]:
    count = 0
    for count, _ in enumerate(read_elements(buffer), start=1):
        if count % _ELEMENTS == 0:
            yield 0
    return count


def _refuse_extensions(members: Json) -> None:
    for name in members.get("parameters") or ():
        if name in _REFUSED:
            raise BadRequest(_REFUSED[name])
