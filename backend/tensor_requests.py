"""Requests of the Open Inference Protocol whose tensors came as bytes, for any handler.

Such a request is a part of the type `TENSORS_TYPE`: one line of JSON, which is the request without
the tensors, and behind it their bytes, as many of each as its parameter ``binary_data_size`` says.
The frontend has checked it. The handler finds the JSON document that a client could have sent
instead: the values of each tensor are in its ``data``, as one flat list; or, where it takes
``arrays``, as an array of numpy in the tensor's shape, for 262,144 numbers are a list of 10 MB.

An element of BYTES is a str where it is text in UTF-8, and else bytes, which JSON could not have
carried. With the parameter ``binary_data_encoding: base64`` it is text in base64, as in TorchServe,
whose gRPC clients send BYTES so.

What the handler returns becomes an answer of the protocol (`tensor_results`), in the same form as
the request.
"""

import base64
import importlib
import json
import struct
from collections.abc import Sequence
from typing import Any

from marserve.backend import tensors
from marserve.backend.protocol import Buffer, Input
from marserve.backend.tensor_results import Output, outputs_of
from marserve.backend.tensors import BYTES, UnusableTensor

#: Tells how many bytes of a body are JSON; the tensors follow.
LENGTH_HEADER = "Inference-Header-Content-Length"
#: What the frontend tells of a request, as JSON: ``id``, ``model_name`` and ``model_version`` of
#: the answer, and the request's ``outputs`` and ``parameters``, or that they are ``in_body``.
FORMAT_HEADER = "ts_tensor_format"
IN_BODY = "in_body"
SIZE = "binary_data_size"
#: Of a request to a handler that takes arrays.
ARRAYS = "arrays"
ENCODING = "binary_data_encoding"

_BODY = "body"
_TOLD = ("id", "model_name", "model_version")
_MEMBERS = (*_TOLD, "parameters")

Json = dict[str, Any]


class UnknownOutput(ValueError):
    """The client asked for an output that the handler did not give."""


def document_of(body: Buffer, *, as_lists: bool = False) -> Json:
    """The document for the handler; with ``as_lists`` even for one that takes arrays.

    Raises:
        ValueError: It is no such body, as a client may have sent one with this type.
    """
    try:
        return _read_document(body, as_lists=as_lists)
    except (KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"no request with tensors: {error!r}") from error


def documents_of(body: Buffer, rows: int, dim: int, *, as_lists: bool = False) -> list[Json]:
    """The documents of the rows of a block (`row_blocks`): each has the length 1 along ``dim``.

    Raises:
        ValueError: See `document_of`.
    """
    try:
        return _read_rows(body, rows, dim, as_lists=as_lists)
    except (KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"no rows of tensors: {error!r}") from error


def _read_rows(body: Buffer, rows: int, dim: int, *, as_lists: bool) -> list[Json]:
    head, buffers = tensors_of(body)
    takes_arrays = head.pop(ARRAYS, False) and not as_lists
    columns = []
    for tensor, buffer, encoding in buffers:
        shape = one_row_of(tensor["shape"], dim)
        if takes_arrays:
            values = flat_array(tensor["datatype"], buffer).reshape([rows, *shape])
            pieces = list(values)
        else:
            values = _values(tensor, buffer, encoding)
            step = len(values) // rows
            pieces = [values[row * step : (row + 1) * step] for row in range(rows)]
        columns.append([{**tensor, "shape": shape, "data": piece} for piece in pieces])
    return [{**head, "inputs": list(row)} for row in zip(*columns, strict=True)]


def one_row_of(shape: Sequence[int], dim: int) -> list[int]:
    """The shape of one row of a tensor that has rows along a dimension."""
    return [*shape[:dim], 1, *shape[dim + 1 :]]


def _read_document(body: Buffer, *, as_lists: bool) -> Json:
    head, buffers = tensors_of(body)
    takes_arrays = head.pop(ARRAYS, False) and not as_lists
    for tensor, buffer, encoding in buffers:
        if takes_arrays:
            tensor["data"] = flat_array(tensor["datatype"], buffer).reshape(tensor["shape"])
        else:
            tensor["data"] = _values(tensor, buffer, encoding)
    return head


def tensors_of(body: Buffer) -> tuple[Json, list[tuple[Json, memoryview, str]]]:
    """The JSON of a request, and those of its inputs that came as bytes, with bytes and encoding.

    Raises:
        Exception: Whatever comes of a body that is none.
    """
    head, at = _split(body)
    view, found = memoryview(body), []
    for tensor in head["inputs"]:
        parameters = tensor.get("parameters") or {}
        if SIZE not in parameters:
            continue
        end = at + parameters.pop(SIZE)
        encoding = parameters.pop(ENCODING, "")
        if not parameters:
            del tensor["parameters"]
        found.append((tensor, view[at:end], encoding))
        at = end
    return head, found


class AnswerFormat:
    """How a request in tensors wants to be answered.

    Args:
        members: Of the answer, where the handler does not say otherwise: its id, its model.
        outputs: Names of the outputs asked for, to whether as bytes; none asks for all.
        is_binary: Whether outputs that are not named go as bytes.
    """

    def __init__(self, members: Json, outputs: dict[str, bool], *, is_binary: bool) -> None:
        self._members = members
        self._wanted = outputs
        self._is_binary = is_binary

    @classmethod
    def of(cls, request: Input, row: dict[str, Any]) -> "AnswerFormat | None":
        """The format that the frontend asks for; None for requests that are not in tensors.

        It is in a header, because with continuous batching the parts of a request come only once;
        or some of it is in the document of the ``row``, where the frontend has not read that.
        """
        try:
            form: Json = json.loads(request.headers[FORMAT_HEADER])
            members = {name: str(form[name]) for name in _TOLD}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None  # a client's own header of that name
        head: Any = row.get(_BODY) if form.get(IN_BODY) else form
        try:
            is_binary = _flag(head, "binary_data_output", default=False)
            outputs = {
                str(output["name"]): _flag(output, "binary_data", default=is_binary)
                for output in head.get("outputs") or ()
            }
            members["id"] = str(head.get("id") or members["id"])
        except (TypeError, KeyError, AttributeError):
            return cls(members, {}, is_binary=False)
        return cls(members, outputs, is_binary=is_binary)

    def encode(self, result: Any) -> tuple[bytes, int]:
        """Write the answer; returns it, and how many bytes of it are JSON.

        Raises:
            UnknownOutput: See there.
            UnusableTensor: An output cannot be sent.
        """
        return self.write(*outputs_of(result, self.output_name))

    @property
    def output_name(self) -> str:
        """Of an output that the handler gives no name; may be empty."""
        return next(iter(self._wanted), "")

    def write(self, document: Json, outputs: list[Output]) -> tuple[bytes, int]:
        """The same for outputs, and the members of the document around them."""
        described, buffers = [], []
        for output in self._chosen(outputs):
            entry: Json = {
                "name": output.name,
                "datatype": output.datatype,
                "shape": output.shape,
            }
            parameters = dict(output.parameters)
            if self._wanted.get(output.name, self._is_binary):
                parameters[SIZE] = len(output.buffer)
                buffers.append(output.buffer)
            else:
                entry["data"] = _json_values(output)
            described.append(entry | ({"parameters": parameters} if parameters else {}))
        members = {name: document[name] for name in _MEMBERS if document.get(name)}
        head = json.dumps(self._members | members | {"outputs": described}).encode() + b"\n"
        return b"".join((head, *buffers)), len(head)

    def _chosen(self, outputs: list[Output]) -> list[Output]:
        if not self._wanted:
            return outputs
        by_name = {output.name: output for output in outputs}
        for name in self._wanted:
            if name not in by_name:
                raise UnknownOutput(
                    f"There is no output {name!r}; the handler gave {', '.join(by_name) or 'none'}."
                )
        return [by_name[name] for name in self._wanted]


def _split(body: Buffer) -> tuple[Json, int]:
    """The line of JSON, and where the tensors begin."""
    body = body if isinstance(body, bytes | bytearray) else bytes(body)
    at = body.index(b"\n") + 1
    head: Json = json.loads(bytes(body[:at]))
    return head, at


def flat_array(datatype: str, buffer: Buffer) -> Any:
    """The values as a flat array, without a copy; of BF16 as FP32, of BYTES as bytes."""
    numpy = importlib.import_module("numpy")
    if datatype == BYTES:
        return numpy.array([*tensors.read_elements(buffer), None], object)[:-1]
    if datatype == "BF16":
        return (numpy.frombuffer(buffer, "<u2").astype("<u4") << 16).view("<f4")
    return numpy.frombuffer(buffer, tensors.NUMPY[datatype])


def _values(tensor: Json, buffer: Buffer, encoding: str) -> list[Any]:
    datatype = tensor["datatype"]
    if datatype != BYTES:
        return tensors.read_numbers(datatype, buffer)
    elements = tensors.read_elements(buffer)
    if encoding:
        return [base64.b64encode(element).decode() for element in elements]
    return list(map(_text_if_possible, elements))


def _text_if_possible(element: bytes) -> str | bytes:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return element


def _flag(members: Any, name: str, *, default: bool) -> bool:
    return bool((members.get("parameters") or {}).get(name, default))


def _json_values(output: Output) -> list[Any]:
    if output.datatype != BYTES:
        return tensors.read_numbers(output.datatype, output.buffer)
    try:
        return [element.decode() for element in tensors.read_elements(output.buffer)]
    except UnicodeDecodeError as error:
        raise UnusableTensor(
            f"output {output.name!r} has an element that is no text; ask for it as binary data"
        ) from error
