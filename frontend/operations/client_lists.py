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
from functools import partial

from marserve.backend.protocol import Buffer, Input, Part, Prediction
from marserve.frontend.aio.json_items import (
    UNREADABLE,
    Loads,
    Text,
    check_json,
    json_items,
    load_strictly,
    load_utf8,
    text_of,
)
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.batching.rows import LateInput

#: Bytes of a row beside its body: its job, headers and parts (measured: 1,194).
ROW_BYTES = 1200
_JSON = "application/json"

#: What is before the body of a row, in pieces, and behind it; such a body is made when it is sent.
Frame = Sequence[Buffer]
NO_FRAME: Frame = ()
_INSTANCES: Frame = (b'{"instances":[', b"]}")
# The envelopes (`service_envelope`) that read instances, and their member for explanations.
_UNPACKING: Mapping[str, str] = {"kserve": "explanations", "json": "predictions"}


@dataclass
class ClientList:
    """The rows of a request, and the form of their joint answer."""

    rows: Sequence[Input]  # in the client's order
    member: str = ""  # the member that has the results; empty for a bare array
    is_enveloped: bool = False  # whether the answer to a row has that member, too
    is_strict: bool = False  # whether JSON of handlers with NaN is text

    def join(self, predictions: Sequence[Prediction]) -> Steps[Prediction]:
        """Return one answer: an array of the bodies of the predictions, as JSON or text.

        If the last prediction has a status other than 200, the answer is that prediction, with its
        index in the header ``x-failed-item``.
        """
        if predictions and predictions[-1].status != 200:
            return failed_item(predictions)
        # As by `json.dumps` with ``indent=2``: no text in JSON has a line break.
        outer = b"\n  " if self.member else b"\n"
        line, pieces = outer + b"  ", list[Buffer]()
        for prediction in predictions:
            for text in (yield from self._results(prediction.body)):
                pieces += (b"," + line if pieces else line, text.replace(b"\n", line))
                yield len(pieces[-1])
        pieces = [b"[", *pieces, outer if pieces else b"", b"]"]
        if self.member:
            pieces = [f'{{\n  "{self.member}": '.encode(), *pieces, b"\n}"]
        return Prediction((yield from joined(pieces)), headers={"content-type": _JSON})

    def _results(self, body: Buffer) -> Steps[list[Text]]:
        if self.is_enveloped:
            with contextlib.suppress(*UNREADABLE, KeyError, TypeError):
                items = json.loads(bytes(body))[self.member]
                return [json.dumps(item, indent=2).encode() for item in items]
        return [(yield from _json_text(body, load_strictly if self.is_strict else load_utf8))]


def failed_item(predictions: Sequence[Prediction]) -> Prediction:
    """Return the last prediction, with its index in the header ``x-failed-item``."""
    last = predictions[-1]
    headers = {**last.headers, "x-failed-item": str(len(predictions) - 1)}
    return replace(last, headers=headers)


def read_list(input_: Input, envelope: str, max_rows: int) -> Steps[ClientList | None]:
    """Split a client's list into rows; return None for a request without a list.

    Of a list with more than ``max_rows``, the limit, one row more is returned, so that it is
    refused. An empty ``envelope`` is none.
    """
    files = [part for part in input_.parts if part.content_type]
    if len(files) > 1:
        rows = [replace(part, name="body") for part in files[: max_rows + 1]]
        return ClientList((yield from rows_of(input_, rows)))
    if not files or files[0].name != "body" or files[0].content_type != _JSON:
        return None
    found = yield from json_items(text_of(files[0].body), max_rows + 1)
    is_enveloped = envelope in _UNPACKING
    if found is None or (is_enveloped and not found.are_instances):
        return None
    member = ""
    if found.are_instances:
        is_explained = input_.headers.get("explain") == "True"
        member = _UNPACKING.get(envelope, "explanations") if is_explained else "predictions"
    bodies = (Part("body", _JSON, text) for text in found.texts)
    frame = _INSTANCES if is_enveloped else NO_FRAME
    return ClientList((yield from rows_of(input_, bodies, frame)), member, is_enveloped)


def rows_of(input_: Input, bodies: Iterable[Part], frame: Frame = NO_FRAME) -> Steps[list[Input]]:
    """Return a request with the headers and fields of another one for each body, in a frame."""
    headers = input_.headers
    kind, length = _as_written(headers, "content-type"), _as_written(headers, "content-length")
    fields = [part for part in input_.parts if not part.content_type]
    around = [Part("", "", text) for text in frame]
    framing = sum(len(text) for text in frame)
    rows: list[Input] = []
    for number, body in enumerate(bodies):
        id_, size = f"{input_.id}.{number}", len(body.body)
        own = {**headers, kind: body.content_type, length: str(framing + size)}
        if frame:
            make = partial(_framed, fields, frame, body)
            rows.append(LateInput(id_, own, [*fields, *around, body], make))
        else:
            rows.append(Input(id_, own, [*fields, body]))
        # A memoryview is of the request.
        yield ROW_BYTES + (0 if isinstance(body.body, memoryview) else size)
    return rows


def _framed(fields: Sequence[Part], frame: Frame, body: Part) -> list[Part]:
    *before, after = frame
    return [*fields, replace(body, body=b"".join((*before, body.body, after)))]


def _as_written(headers: Mapping[str, str], name: str) -> str:
    return next((key for key in headers if key.lower() == name), name)


def _json_text(body: Buffer, loads: Loads) -> Steps[Text]:
    text = bytes(body).decode("utf-8", "replace").encode()
    try:
        start, stop = yield from check_json(text, loads)
    except UNREADABLE:
        return json.dumps(text.decode()).encode()
    return text[start:stop]
