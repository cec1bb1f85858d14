"""Client lists: splits a request with several items into one request each, and joins the answers.

For models with ``dynamicBatchSize``.

    [a, b, …]                        answered by [of a, of b, …]
    {"instances": [a, b, …]}         answered by {"predictions": [of a, of b, …]}, KServe's first
                                     protocol; explained, they are "explanations"
    multipart with several files     answered by [of the first file, of the second, …]

For the handler a row is a request with that item alone: a part ``body``, with the other fields of
the request. For an envelope that unpacks instances, a row is ``{"instances": [a]}``.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from marserve.backend.protocol import Buffer, Input, Part, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.operations.json_items import UNREADABLE, json_items

_JSON = "application/json"
# The envelopes (`service_envelope`) that read instances, and their member for explanations.
_UNPACKING: Mapping[str, str] = {"kserve": "explanations", "json": "predictions"}


@dataclass(frozen=True)
class ClientList:
    """The rows of a request, and the form of their joint answer."""

    rows: Sequence[Input]  # in the client's order
    member: str = ""  # the member that has the results; empty for a bare array
    is_enveloped: bool = False  # whether the answer to a row has that member, too

    def join(self, predictions: Sequence[Prediction]) -> Steps[Prediction]:
        """Return one answer: an array of the bodies of the predictions, as JSON or text.

        If the last prediction has a status other than 200, the answer is that prediction, with its
        index in the header ``x-failed-item``.
        """
        if predictions and predictions[-1].status != 200:
            return failed_item(predictions)
        results: list[str] = []
        for prediction in predictions:
            results += self._results(prediction.body)
            yield
        body = self._joined(results).encode()
        return Prediction(body, headers={"content-type": _JSON})

    def _results(self, body: Buffer) -> list[str]:
        if self.is_enveloped:
            with contextlib.suppress(*UNREADABLE, KeyError, TypeError):
                return [json.dumps(item, indent=2) for item in json.loads(bytes(body))[self.member]]
        return [_json_text(body)]

    def _joined(self, results: Sequence[str]) -> str:
        """Join texts as `json.dumps` does with ``indent=2``: no text in JSON has a line break."""
        joined = ",\n".join(results).replace("\n", "\n  ")
        joined = f"[\n  {joined}\n]" if results else "[]"
        if self.member:
            joined = joined.replace("\n", "\n  ")
            joined = f'{{\n  "{self.member}": {joined}\n}}'
        return joined


def failed_item(predictions: Sequence[Prediction]) -> Prediction:
    """Return the last prediction, with its index in the header ``x-failed-item``."""
    last = predictions[-1]
    headers = {**last.headers, "x-failed-item": str(len(predictions) - 1)}
    return replace(last, headers=headers)


def read_list(input_: Input, envelope: str, max_rows: int) -> Steps[ClientList | None]:
    """Split a client's list into rows; return None for a request without a list.

    Of a list with more than ``max_rows``, the free capacity of the queue, one row more is returned,
    so that it is refused. An empty ``envelope`` is none.
    """
    files = [part for part in input_.parts if part.content_type]
    if len(files) > 1:
        rows = [replace(part, name="body") for part in files[: max_rows + 1]]
        return ClientList(rows_of(input_, rows))
    if not files or files[0].name != "body" or files[0].content_type != _JSON:
        return None
    found = yield from json_items(bytes(files[0].body), max_rows + 1)
    is_enveloped = envelope in _UNPACKING
    if found is None or (is_enveloped and not found.are_instances):
        return None
    member = ""
    if found.are_instances:
        is_explained = input_.headers.get("explain") == "True"
        member = _UNPACKING.get(envelope, "explanations") if is_explained else "predictions"
    row = b'{"instances":[%b]}' if is_enveloped else b"%b"
    bodies = [Part("body", _JSON, row % text) for text in found.texts]
    return ClientList(rows_of(input_, bodies), member, is_enveloped)


def rows_of(input_: Input, bodies: Iterable[Part]) -> list[Input]:
    """Return a request with the headers and fields of another one for each body."""
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
    return next((key for key in headers if key.lower() == name), name)


def _json_text(body: Buffer) -> str:
    text = bytes(body).decode("utf-8", "replace")
    stripped = text.strip()
    try:
        json.loads(stripped)
    except UNREADABLE:
        return json.dumps(text)
    return stripped
