"""``json``: TensorFlow Serving's format, ``{"instances": [...]}`` to ``{"predictions": [...]}``."""

import json
from base64 import b64decode
from typing import Any

from marserve.handlers.request_envelope.instances import InstancesEnvelope, parsed_body


class JSONEnvelope(InstancesEnvelope):
    """Gives the handler the instances of all requests; the answers are JSON texts.

    An instance ``{"b64": text}``, and a column of that form in an instance, is given as bytes.
    """

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's instances."""
        return [_decoded(instance) for instance in (parsed_body(row) or row)["instances"]]

    def answer(self, results: Any, index: int) -> str:
        """Make the text ``{"predictions": [...]}``, with one result per instance."""
        return json.dumps({"predictions": results[: self._counts[index]]})


def _decoded(instance: Any) -> Any:
    if not isinstance(instance, dict):
        return instance
    if _is_binary(instance):
        return b64decode(instance["b64"])
    return {
        name: b64decode(value["b64"]) if _is_binary(value) else value
        for name, value in instance.items()
    }


def _is_binary(value: Any) -> bool:
    return isinstance(value, dict) and [*value] == ["b64"]
