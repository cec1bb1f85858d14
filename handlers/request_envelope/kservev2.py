"""``kservev2``: the Open Inference Protocol, ``{"inputs": [...]}`` to ``{"outputs": [...]}``.

The handler gets each input as a dict whose ``data`` is the first element of BYTES, or numbers as
nested lists in the input's shape. As in TorchServe, the datatype of numbers in JSON is not applied,
outputs have the names of the inputs and the datatype that numpy chooses for the result (FP32 comes
back as FP64), and name and version of the model are the manifest's.

Not in TorchServe, and needed by the protocol's clients:

* Tensors may be bytes behind the JSON, also in answers if a request asks for it.
* ``outputs`` of a request selects inputs' names; other names are those of the results, in order.
* Inputs that the model declares must be there as declared (`tensors.checks.check_declared`).
* An answer with an error status has the member ``error``.
"""

from typing import Any

import numpy as np

from marserve.backend.json_text import KEEP, NotJson, to_json
from marserve.backend.tensors.checks import check_declared, resolved_shape
from marserve.backend.tensors.datatypes import NUMPY, UnusableTensor
from marserve.backend.tensors.wire import LENGTH_HEADER
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.binary_tensors import (
    TensorRequest,
    read_request,
    to_buffer,
)
from marserve.handlers.request_envelope.instances import InstancesEnvelope
from marserve.handlers.utils import value_of

_MAX_NAME = 80
_NUMBERS = "biuf"  # numpy's kinds: booleans, integers, floats
_DATATYPES = {np.dtype(dtype).name: name for name, dtype in NUMPY.items()} | {"object": "BYTES"}


class KServev2Envelope(InstancesEnvelope):
    """Passes the inputs of all requests to the handler; its results become outputs.

    The context has ``input_names``, and ``input_request_id`` if the first request has an id.
    """

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._requests: list[TensorRequest] = []

    def parse_input(self, data: Any) -> list[Any]:
        """Parse the requests; return the inputs of all."""
        self._requests = []
        inputs = super().parse_input(data)
        self.context.input_names = [tensor["name"] for tensor in inputs]
        request_id = self._requests[0].id
        if request_id is not None:
            self.context.input_request_id = request_id
        elif hasattr(self.context, "input_request_id"):
            del self.context.input_request_id  # an earlier batch's
        return inputs

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's inputs."""
        self._requests.append(TensorRequest())  # stays if parsing fails
        value = value_of(row)
        is_parsed = not isinstance(value, bytes | bytearray | str)
        place = len(self._requests) - 1
        headers = {} if is_parsed else self.context.get_all_request_header(place)
        body = read_request(value, headers)
        inputs = [_for_handler(tensor) for tensor in body["inputs"]]
        try:
            shapes = map(_shape_of, body["inputs"], inputs)
            check_declared(body["inputs"], shapes, self.context.tensors.get("inputs", ()))
        except UnusableTensor as error:
            raise UnusableInput(str(error)) from error
        self._requests[-1] = TensorRequest.of(body)
        return inputs

    def answer(self, results: Any, index: int) -> dict[str, Any] | bytes:
        """Return the response to one request, as bytes if tensors follow the JSON."""
        request = self._requests[index]
        error = self._error_of(results, index)
        buffers: list[bytes] = []
        model = (self.context.manifest or {}).get("model") or {}
        document = {
            "id": request.id or self.context.get_request_id(index),
            "model_name": model.get("modelName") or self.context.model_name,
            "model_version": model.get("modelVersion"),
            "outputs": [
                _output(name, result, buffers if as_bytes and error is None else None)
                for name, result, as_bytes in request.outputs_of(results)
            ],
        }
        if error is not None:
            return document | {"error": error}
        try:
            return self._packed(document, buffers, index) if buffers else document
        except NotJson as error:
            return self.failure(500, "InternalServerException", str(error), index)

    def failure(self, status: int, kind: str, message: str, index: int) -> dict[str, Any]:
        """Return the answer to a request that failed, with the member ``error``."""
        return super().failure(status, kind, message, index) | {"error": message}

    def _error_of(self, results: Any, index: int) -> str | None:
        """Return the message for the client if the handler set an error status."""
        found = self.context.get_response_status(index)  # of a mock: not two values
        if not isinstance(status := found[0], int) or status < 400:
            return None
        if self.context.get_response_content_type(index) is None:
            self.context.set_response_content_type(index, "application/json")
        dicts = (result for result in results if isinstance(result, dict))
        messages = [result["message"] for result in dicts if "message" in result]
        return str(messages[0] if messages else found[1] or f"Status {status}")

    def _packed(self, document: dict[str, Any], buffers: list[bytes], index: int) -> bytes:
        text = to_json(document, getattr(self.context, "json_nan", KEEP)).encode()
        self.context.set_response_header(index, LENGTH_HEADER, str(len(text)))
        self.context.set_response_content_type(index, "application/octet-stream")
        return b"".join([text, *buffers])


def _for_handler(tensor: dict[str, Any]) -> dict[str, Any]:
    name, datatype, data = tensor["name"][:_MAX_NAME], tensor["datatype"], tensor.get("data")
    if datatype == "BYTES":
        if not isinstance(data, list) or not data:
            raise UnusableInput(f"Input {name!r}: data must be a list of at least one element.")
        return {**tensor, "data": data[0]}
    try:
        values = np.array(data).reshape(tensor["shape"])
    except ValueError as error:
        raise UnusableInput(f"Input {name!r}: data does not fit the shape: {error}") from error
    if datatype in NUMPY and values.dtype.kind not in _NUMBERS:
        raise UnusableInput(f"Input {name!r}: data is not {datatype}.")
    return {**tensor, "data": values.tolist()}


def _shape_of(sent: dict[str, Any], tensor: dict[str, Any]) -> list[int]:
    shape: list[int] = sent["shape"]
    if tensor["datatype"] == "BYTES":
        return resolved_shape(shape, len(sent["data"]))
    return resolved_shape(shape, np.size(tensor["data"]))


def _output(name: str, result: Any, buffers: list[bytes] | None) -> dict[str, Any]:
    """Return a result's description; its data are in it, or appended to ``buffers``."""
    values = np.array(result)
    if values.dtype.kind == "S":  # numpy would strip trailing zero bytes
        values = np.array(result, dtype=object)
    datatype = "BYTES" if values.dtype.kind == "U" else _DATATYPES[str(values.dtype)]
    described = {"name": name, "datatype": datatype}
    if buffers is None:  # flat data have the shape that TorchServe sent
        return described | {"data": values.flatten().tolist(), "shape": [values.size]}
    buffers.append(to_buffer(values, datatype))
    size = {"binary_data_size": len(buffers[-1])}
    return described | {"shape": list(values.shape), "parameters": size}
