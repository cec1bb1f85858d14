"""``kservev2``: the Open Inference Protocol, ``{"inputs": [...]}`` to ``{"outputs": [...]}``.

An input reaches the handler as the dict it is, its ``data`` made ready: of BYTES the first element,
of numbers nested lists in the input's shape. As in TorchServe, a datatype is not applied to the
numbers, outputs bear the names of the inputs, and their datatype is what numpy makes of the result
(so FP32 comes back as FP64), name and version of the model are the manifest's.
"""

import json
from typing import Any

import numpy as np

from marserve.handlers.request_envelope.instances import InstancesEnvelope
from marserve.handlers.utils import value_of

_DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
    "object": "BYTES",
}


class KServev2Envelope(InstancesEnvelope):
    """Gives the handler the inputs of all requests; its results become outputs.

    The context has ``input_names``, the names of all inputs, and, if the first request gave itself
    an id, ``input_request_id``.
    """

    def __init__(self, handle_fn: Any) -> None:
        super().__init__(handle_fn)
        self._requests: list[dict[str, Any]] = []

    def parse_input(self, data: Any) -> list[Any]:
        """Parse the requests; return the inputs of all."""
        self._requests = []
        inputs = super().parse_input(data)
        self.context.input_names = [one["name"] for one in inputs]
        given = _id_of(self._requests[0])
        if given is not None:
            self.context.input_request_id = given
        elif hasattr(self.context, "input_request_id"):
            del self.context.input_request_id  # an earlier batch's
        return inputs

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's inputs.

        Raises:
            KeyError, TypeError, ValueError: It is not in the format.
        """
        self._requests.append({})  # keeps the place of one that cannot be parsed
        body = value_of(row)
        if isinstance(body, bytes | bytearray | str):
            body = json.loads(body)
        inputs = [_made_ready(one) for one in body["inputs"]]
        self._requests[-1] = {"id": body.get("id"), "names": [one["name"] for one in inputs]}
        return inputs

    def answer(self, results: Any, index: int) -> dict[str, Any]:
        """Make the response of one request.

        Raises:
            IndexError: There are more results than inputs.
            KeyError: A result is of a type that the protocol has no name for.
        """
        request = self._requests[index]
        model = (self.context.manifest or {}).get("model") or {}
        return {
            "id": _id_of(request) or self.context.get_request_id(index),
            "model_name": model.get("modelName") or self.context.model_name,
            "model_version": model.get("modelVersion"),
            "outputs": [_output(request["names"][i], one) for i, one in enumerate(results)],
        }


def _id_of(request: dict[str, Any]) -> Any:
    given = request.get("id")
    return given if given is not None and str(given).strip() else None


def _made_ready(given: dict[str, Any]) -> dict[str, Any]:
    if given["datatype"] == "BYTES":
        return {**given, "data": given["data"][0]}
    return {**given, "data": np.array(given["data"]).reshape(given["shape"]).tolist()}


def _output(name: str, result: Any) -> dict[str, Any]:
    values = np.array(result)
    return {
        "name": name,
        "datatype": "BYTES" if values.dtype.kind == "U" else _DATATYPES[str(values.dtype)],
        "data": values.flatten().tolist(),
        "shape": list(values.shape),
    }
