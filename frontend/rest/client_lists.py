"""Client lists: splits a request with several items into one request each, and joins the answers.

For models with ``dynamicBatchSize``. Batches are then made of the items (rows) of all clients: a
long list is spread over several batches and workers, short lists of several clients share a batch.

    [a, b, …]                        answered by [of a, of b, …]
    {"instances": [a, b, …]}         answered by {"predictions": [of a, of b, …]}, KServe's first
                                     protocol; explained, they are "explanations"
    multipart with several files     answered by [of the first file, of the second, …]

A row looks to the handler like a request of that item alone: a part ``body`` (JSON, or the bytes
and the type of the file), with the fields that came beside it. Where the server's envelope unpacks
instances, a row is ``{"instances": [a]}``. Whatever is no list stays one row.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from marserve.backend.protocol import Buffer, Input, Part, Prediction
from marserve.frontend.http.responses import HttpResponse, prediction_response

_JSON = "application/json"
# Envelopes (`service_envelope`) that want instances, to the word they answer explanations with.
_UNPACKING: Mapping[str, str] = {"kserve": "explanations", "json": "predictions"}
_UNREADABLE = (ValueError, RecursionError)

_to_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@dataclass(frozen=True)
class ClientList:
    """The rows of a request, and what their answers become."""

    rows: Sequence[Input]  # in the client's order
    member: str = ""  # under which name their results are answered; empty for a bare array
    is_enveloped: bool = False  # whether the answer to a row has that member, too

    def response(self, predictions: Sequence[Prediction]) -> HttpResponse:
        """One response of the predictions of the rows: their bodies, as JSON or text, in an array.

        Where the handler set a status other than 200, which `ModelVersion.predict_all` has last,
        that prediction alone, with its place, from 0, in the header ``x-failed-item``.
        """
        if predictions and (last := predictions[-1]).status != 200:
            headers = {**last.headers, "x-failed-item": str(len(predictions) - 1)}
            return prediction_response(replace(last, headers=headers))
        results = [text for each in predictions for text in self._results(each.body)]
        body = self._joined(results).encode()
        return prediction_response(Prediction(body, headers={"content-type": _JSON}))

    def _results(self, body: Buffer) -> list[str]:
        if self.is_enveloped:
            with contextlib.suppress(*_UNREADABLE, KeyError, TypeError):
                return [json.dumps(item, indent=2) for item in json.loads(bytes(body))[self.member]]
        return [_json_text(body)]

    def _joined(self, results: Sequence[str]) -> str:
        """As `json.dumps` writes it with two spaces: no text in JSON has a line break in it."""
        joined = ",\n".join(results).replace("\n", "\n  ")
        joined = f"[\n  {joined}\n]" if results else "[]"
        if self.member:
            joined = joined.replace("\n", "\n  ")
            joined = f'{{\n  "{self.member}": {joined}\n}}'
        return joined


def read_list(input_: Input, envelope: str, max_rows: int) -> ClientList | None:
    """Take a client's list apart; None for a request that is none.

    Args:
        input_: The request, with all its parts.
        envelope: What is wrapped around the handler; empty for nothing.
        max_rows: As many as can be queued. A longer list is cut behind one more, to be refused.
    """
    files = [part for part in input_.parts if part.content_type]
    if len(files) > 1:
        rows = [replace(part, name="body") for part in files[: max_rows + 1]]
        return ClientList(_rows(input_, rows))
    if not files or files[0].name != "body" or files[0].content_type != _JSON:
        return None
    try:
        return _from_json(input_, json.loads(bytes(files[0].body)), envelope, max_rows)
    except _UNREADABLE:
        return None


def _from_json(input_: Input, document: Any, envelope: str, max_rows: int) -> ClientList | None:
    is_enveloped = envelope in _UNPACKING
    member = ""
    if isinstance(document, dict):
        document = document.get("instances")
        is_explained = input_.headers.get("explain") == "True"
        member = _UNPACKING.get(envelope, "explanations") if is_explained else "predictions"
    elif is_enveloped:
        return None
    if not isinstance(document, list):
        return None
    items = document[: max_rows + 1]
    if is_enveloped:
        items = [{"instances": [item]} for item in items]
    bodies = [Part("body", _JSON, _to_json(item).encode()) for item in items]
    return ClientList(_rows(input_, bodies), member, is_enveloped)


def _rows(input_: Input, bodies: Iterable[Part]) -> list[Input]:
    """A request for each body, with the headers and the fields of the one that brought them all."""
    headers = input_.headers
    kind, length = _as_written(headers, "content-type"), _as_written(headers, "content-length")
    fields = [part for part in input_.parts if not part.content_type]
    return [
        Input(
            f"{input_.id}.{number}",
            {**headers, kind: body.content_type, length: str(len(body.body))},
            [*fields, body],
        )
        for number, body in enumerate(bodies)
    ]


def _as_written(headers: Mapping[str, str], name: str) -> str:
    """A header's name as the client writes it."""
    return next((key for key in headers if key.lower() == name), name)


def _json_text(body: Buffer) -> str:
    """A body as a JSON text."""
    text = bytes(body).decode("utf-8", "replace")
    stripped = text.strip()
    try:
        json.loads(stripped)
    except _UNREADABLE:
        return json.dumps(text)
    return stripped
