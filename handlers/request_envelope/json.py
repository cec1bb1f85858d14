"""``json``: TensorFlow Serving's format, ``{"instances": [...]}`` to ``{"predictions": [...]}``."""

from base64 import b64decode
from typing import Any

from marserve.backend.json_text import KEEP, NotJson, to_json
from marserve.handlers.refusals import UnusableInput
from marserve.handlers.request_envelope.instances import (
    InstancesEnvelope,
    listed_instances,
    parsed_body,
)


class JSONEnvelope(InstancesEnvelope):
    """Passes the instances of all requests to the handler; answers are JSON texts.

    An instance ``{"b64": text}``, or a column of that form in an instance, becomes bytes.
    """

    def instances_of(self, row: Any) -> list[Any]:
        """Return the request's instances."""
        return [_decoded(instance) for instance in listed_instances(parsed_body(row) or row)]

    def answer(self, results: Any, index: int) -> Any:
        """Return the text ``{"predictions": [...]}``, or a refusal of numbers that are no JSON."""
        document = {"predictions": results[: len(self._instances[index])]}
        try:
            return to_json(document, getattr(self.context, "json_nan", KEEP))
        except NotJson as error:
            return self.failure(500, "InternalServerException", str(error), index)


def _decoded(instance: Any) -> Any:
    value = _value(instance)
    if isinstance(value, dict):
        return {name: _value(column) for name, column in value.items()}
    return value


def _value(value: Any) -> Any:
    """Decode base64, which may be broken into lines; return others unchanged."""
    if not isinstance(value, dict) or [*value] != ["b64"]:
        return value
    text = value["b64"]
    if not isinstance(text, str):
        raise UnusableInput("b64 must be a text.")
    try:
        return b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise UnusableInput(f"b64 is not base64: {error}") from error
