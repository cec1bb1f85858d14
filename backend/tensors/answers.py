"""Answers to requests of the Open Inference Protocol, in the format that the request asks for."""

import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from marserve.backend.json_text import KEEP, REFUSE, NotJson, to_json, with_nulls
from marserve.backend.protocol import Input
from marserve.backend.tensors.checks import check_values
from marserve.backend.tensors.datatypes import (
    BYTES,
    FLOATS,
    UnusableTensor,
    read_elements,
    read_numbers,
)
from marserve.backend.tensors.outputs import outputs_of
from marserve.backend.tensors.rows import Output
from marserve.backend.tensors.wire import FORMAT_HEADER, IN_BODY, SIZE, Json, WantedOutputs

_BODY = "body"
_OWN_MEMBERS = ("id", "model_name", "model_version")
_MEMBERS = (*_OWN_MEMBERS, "parameters")
_NONE: Mapping[str, Any] = MappingProxyType({})


def json_numbers(output: Output, json_nan: str) -> list[Any]:
    """Return the numbers of an output for JSON; NotJson if one is not finite, and refused."""
    numbers = read_numbers(output.datatype, output.buffer)
    if json_nan == KEEP or output.datatype not in FLOATS or all(map(math.isfinite, numbers)):
        return numbers
    if json_nan == REFUSE:
        raise NotJson(f"output {output.name!r} has a number that is not finite")
    return with_nulls(numbers)


class UnknownOutput(ValueError):
    """The client asks for an output that the handler did not return."""


class AnswerFormat:
    """The format of an answer.

    Args:
        members: Its id and model.
        declared: The tensors that the model declares (`checks.is_declaration`).
    """

    def __init__(
        self, members: Json, wanted: WantedOutputs, declared: Mapping[str, Any] = _NONE
    ) -> None:
        self._members = members
        self._wanted = wanted
        self._outputs = declared.get("outputs", ())
        self.json_nan = KEEP

    @classmethod
    def of(
        cls, request: Input, row: dict[str, Any], declared: Mapping[str, Any] = _NONE
    ) -> "AnswerFormat | None":
        """Return the format that the frontend asks for; None for requests without tensors.

        It is in a header, because with continuous batching the parts of a request are sent only
        once. If the frontend has not read the document, a part of it is in the ``row``.

        Raises:
            UnusableTensor: An input in JSON contradicts its datatype or shape, or the declaration.
        """
        try:
            form: Json = json.loads(request.headers[FORMAT_HEADER])
            members = {name: str(form[name]) for name in _OWN_MEMBERS}
        except (ValueError, TypeError, KeyError, RecursionError):
            return None  # a client's own header of that name
        head: Any = form
        if form.get(IN_BODY):
            head, wanted_inputs = row.get(_BODY), declared.get("inputs", ())
            if isinstance(head, dict) and (wanted_inputs or isinstance(head.get("inputs"), list)):
                check_values(head, wanted_inputs)
        try:
            wanted = WantedOutputs.of(head)
            members["id"] = str(head.get("id") or members["id"])
        except (TypeError, KeyError, AttributeError):
            wanted = WantedOutputs()
        return cls(members, wanted, declared)

    @property
    def output_name(self) -> str:
        """The name of an output to which the handler gives none; may be empty."""
        if len(self._outputs) == 1:
            return str(self._outputs[0]["name"])
        return next(iter(self._wanted.names), "")

    def encode(self, result: Any) -> tuple[bytes, int]:
        """Return the answer with a handler's result, and the number of its bytes that are JSON."""
        return self.write(*outputs_of(result, self.output_name))

    def write(self, document: Json, outputs: Sequence[Output]) -> tuple[bytes, int]:
        """Return the answer with outputs, and the members of a document around them."""
        described, buffers = [], []
        for output in self._chosen(outputs):
            entry: Json = {
                "name": output.name,
                "datatype": output.datatype,
                "shape": output.shape,
            }
            parameters = dict(output.parameters)
            if self._wanted.is_bytes(output.name):
                parameters[SIZE] = len(output.buffer)
                buffers.append(output.buffer)
            else:
                entry["data"] = _json_values(output, self.json_nan)
            described.append(entry | ({"parameters": parameters} if parameters else {}))
        members = {name: document[name] for name in _MEMBERS if document.get(name)}
        text = to_json(self._members | members | {"outputs": described}, self.json_nan)
        head = text.encode() + b"\n"
        return b"".join((head, *buffers)), len(head)

    def _chosen(self, outputs: Sequence[Output]) -> Sequence[Output]:
        if not self._wanted.names:
            return outputs
        by_name = {output.name: output for output in outputs}
        for name in self._wanted.names:
            if name not in by_name:
                raise UnknownOutput(
                    f"There is no output {name!r}; the handler gave {', '.join(by_name) or 'none'}."
                )
        return [by_name[name] for name in self._wanted.names]


def _json_values(output: Output, json_nan: str) -> list[Any]:
    if output.datatype != BYTES:
        return json_numbers(output, json_nan)
    try:
        return [element.decode() for element in read_elements(output.buffer)]
    except UnicodeDecodeError as error:
        raise UnusableTensor(
            f"output {output.name!r} has an element that is not text; request it as binary data"
        ) from error
