"""OpenAI's embeddings and reranking by any model: each input or document is a request of its own.

The handler gets a body in JSON, as of an item of a client's list, and answers with JSON:

    openai: embeddings   a text or a list of token ids   [0.1, …] or {"embedding": […], "tokens": 3}
    openai: rerank       {"query": …, "document": …}     0.7 or {"score": 0.7, "tokens": 12}
"""

import base64
import json
import math
import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.aio.json_items import (
    SMALL_BYTES,
    UNREADABLE,
    Span,
    Text,
    check_value,
    items_at,
    number_lists,
    object_members,
    text_of,
    value_in,
)
from marserve.frontend.aio.long_work import Steps, joined
from marserve.frontend.configuration.setting_kinds import FLAG, TEXT, Kind, whole, word
from marserve.frontend.errors import BadRequest, PredictionFailed, ServeError
from marserve.frontend.operations.client_lists import rows_of

#: The rows of a request, and what joins the answers.
Rows = tuple[Sequence[Input], Callable[[Sequence[Prediction]], Steps[Prediction]]]
T = TypeVar("T")

_JSON = "application/json"
_EMBEDDING = ("input", "encoding_format", "dimensions")
_MEMBERS = ("model", *_EMBEDDING, "query", "documents", "top_n", "return_documents")
_TOKEN_IDS = re.compile(rb"\[\s*[-0-9]")
_QUOTED = 80  # characters of a wrong member


def _is_input(value: Any) -> bool:
    is_list = isinstance(value, list) and value != []
    return isinstance(value, str) or (is_list and all(type(token) is int for token in value))


_INPUT = Kind("a text, a list of texts, a list of token ids, or a list of those", _is_input)
_DOCUMENTS = Kind('a list of texts, or of objects {"text": "…"}', TEXT.accepts)
_FORM = word("float", "base64")
_UNSUPPORTED = Kind("not supported here", lambda _: False)
_ANY = Kind("a small value", lambda _: True)
# The errors of an answer that is not as documented.
_UNUSABLE = (*UNREADABLE, TypeError, KeyError, OverflowError, struct.error, BadRequest)

_to_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Members:
    """The members of a request that the server reads, as spans of its body."""

    body: Text
    spans: Mapping[str, Span]

    def __contains__(self, name: str) -> bool:
        return name in self.spans

    def span(self, name: str) -> Span:
        """Return where the value of a member is; an empty span without one."""
        return self.spans.get(name, (0, 0))

    def read(self, name: str, kind: Kind, *default: Any) -> Any:
        """Return the value of a member, or raise BadRequest."""
        if default and name not in self.spans:
            return default[0]
        start, stop = self.span(name)
        if stop - start <= SMALL_BYTES:
            with suppress(*UNREADABLE):
                value = json.loads(self.body[start:stop] or b"null")
                if kind.accepts(value):
                    return value
        raise self.wrong(name, (start, stop), kind)

    def check(self, name: str, span: Span, kind: Kind) -> Steps[None]:
        """Raise BadRequest unless a value is as ``kind``; a large text may be any."""
        start, stop = span
        if stop - start <= SMALL_BYTES or not self.body.startswith(b'"', start):
            Members(self.body, {name: span}).read(name, kind)
            return
        try:
            yield from check_value(self.body, start, stop)
        except UNREADABLE as error:
            raise self.wrong(name, span, kind) from error

    def wrong(self, name: str, span: Span, kind: Kind) -> BadRequest:
        """Return the error for a member with this value."""
        start, stop = span
        text = bytes(self.body[start : min(stop, start + _QUOTED)]) or b"null"
        return BadRequest(f"{name}={text.decode('utf-8', 'replace')}: it is {kind.rule}.")


def read_members(body: Text) -> Steps[Members]:
    """Return the members of a request that the server reads; raises BadRequest."""
    try:
        found = yield from object_members(body, _MEMBERS)
    except UNREADABLE as error:
        what = "The body must be a JSON object, with the media type application/json."
        raise BadRequest(what) from error
    nulls = [
        name
        for name, (start, stop) in found.items()
        if body[start : min(stop, start + 5)] == b"null"
    ]
    return Members(body, {name: span for name, span in found.items() if name not in nulls})


def embedding_rows(input_: Input, members: Members, max_rows: int, _copies: int) -> Steps[Rows]:
    """Split a request into its inputs; raises BadRequest. Parameters as `reranking_rows`."""
    members.read("dimensions", _UNSUPPORTED, None)
    is_packed = members.read("encoding_format", _FORM, "") == "base64"
    body, (start, _) = members.body, members.span("input")
    is_list = body.startswith(b"[", start) and not _TOKEN_IDS.match(body, start)
    spans = [members.span("input")]
    if is_list:
        spans = yield from _items(members, "input", _INPUT, max_rows)
    for span in spans:
        if span[1] - span[0] <= SMALL_BYTES or not body.startswith(b"[", span[0]):
            yield from members.check("input", span, _INPUT)
        yield 0

    def join(predictions: Sequence[Prediction]) -> Steps[Prediction]:
        read = partial(_read_embedding, is_packed)
        found, tokens = yield from _read_answers(predictions, "embedding", read)
        form = b'{"object":"embedding","index":%d,"embedding":%b}'
        data = [form % pair for pair in enumerate(found)]
        usage = _to_json({"prompt_tokens": tokens, "total_tokens": tokens})
        return (yield from _answer(members, '"object":"list","data"', data, usage))

    view = memoryview(body)
    bodies = (Part("body", _JSON, view[slice(*span)]) for span in spans)
    return (yield from rows_of(replace(input_, parts=[]), bodies)), join


def reranking_rows(input_: Input, members: Members, max_rows: int, copies: int) -> Steps[Rows]:
    """Split a request into pairs of the query and a document; raises BadRequest.

    Of more than ``max_rows`` one more is returned, so that the request is refused. A pair is made
    when it is sent to a worker, so that ``copies`` of the query are in memory at the same time.
    """
    top = members.read("top_n", whole(0), 0)
    has_documents = members.read("return_documents", FLAG, True)
    yield from members.check("query", members.span("query"), TEXT)
    body, documents = members.body, list[Span]()
    for start, stop in (yield from _items(members, "documents", _DOCUMENTS, max_rows)):
        document = start, stop
        if body.startswith(b"{", start):
            with suppress(*UNREADABLE):
                found = yield from object_members(body, ("text",), start, stop)
                document = found.get("text", document)
        yield from members.check("documents", document, _DOCUMENTS)
        documents.append(document)
        yield 0
    view = memoryview(body)
    query = view[slice(*members.span("query"))]
    yield len(query) * min(copies, len(documents))
    frame = b'{"query":', query, b',"document":', b"}"
    bodies = (Part("body", _JSON, view[slice(*span)]) for span in documents)
    rows = yield from rows_of(replace(input_, parts=[]), bodies, frame)

    def join(predictions: Sequence[Prediction]) -> Steps[Prediction]:
        scores, tokens = yield from _read_answers(predictions, "score", _read_score)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = []
        for index in order[: top or None]:
            text = b""
            if has_documents:
                utf8 = bytes(view[slice(*documents[index])]).decode("utf-8", "replace").encode()
                text = b',"document":{"text":%b}' % utf8
            results.append(b'{"index":%d,"relevance_score":%a%b}' % (index, scores[index], text))
            yield len(results[-1])
        usage = _to_json({"total_tokens": tokens})
        head = f'"id":{_to_json(input_.id)},"results"'
        return (yield from _answer(members, head, results, usage))

    return rows, join


#: How a request is split, by the setting ``openai`` of the model.
SPLITTERS = {"embeddings": embedding_rows, "rerank": reranking_rows}


def _items(members: Members, name: str, kind: Kind, max_rows: int) -> Steps[list[Span]]:
    start, stop = members.span(name)
    with suppress(*UNREADABLE):
        if members.body.startswith(b"[", start) and stop:
            items, _ = yield from items_at(members.body, start, max_rows + 1)
            if items:
                return items
    raise members.wrong(name, (start, stop), kind)


def _read_score(answer: Text, span: Span) -> Steps[float]:
    score = Members(answer, {"score": span}).read("score", _ANY)
    yield from ()
    if type(score) not in (int, float) or not math.isfinite(score):
        raise ValueError("no finite number")
    return float(score)


def _read_embedding(is_packed: bool, answer: Text, span: Span) -> Steps[bytes]:
    """Return a list of numbers as JSON, or as a text of JSON with their FP32 in base64."""
    start, stop = span
    if not answer.startswith(b"[", start) or not answer.endswith(b"]", start, stop):
        raise ValueError("no list")
    pieces = []
    for numbers in number_lists(answer, start + 1, stop - 1):
        if not all(map(math.isfinite, numbers)):
            raise ValueError("no finite numbers")
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        pieces.append(packed if is_packed else _to_json(numbers)[1:-1].encode())
        yield len(pieces[-1])
    if is_packed:
        return b'"%b"' % base64.b64encode(b"".join(pieces))
    return b"[%b]" % b",".join(pieces)


def _read_answers(
    predictions: Sequence[Prediction], member: str, read: Callable[[Text, Span], Steps[T]]
) -> Steps[tuple[list[T], int]]:
    """Return what the answers to the rows hold, and their tokens; raises the error of a row."""
    found, tokens = [], 0
    for index, prediction in enumerate(predictions):
        body = text_of(prediction.body)
        if prediction.status != 200:
            text = body.decode("utf-8", "replace")
            status = prediction.status if prediction.status >= 400 else 503
            raise PredictionFailed(f"Item {index}: {text}", status=status)
        try:
            span = yield from value_in(body)
            if body.startswith(b"{", span[0]):
                spans = yield from object_members(body, (member, "tokens"))
                span = spans[member]
                tokens += operator.index(Members(body, spans).read("tokens", _ANY, 0))
            found.append((yield from read(body, span)))
        except _UNUSABLE as error:
            what = f"no {member}, or tokens that are no whole number"
            raise ServeError(f"The handler's answer to item {index} has {what}.") from error
        yield 0
    return found, tokens


def _answer(members: Members, head: str, items: Sequence[bytes], usage: str) -> Steps[Prediction]:
    model = bytes(members.body[slice(*members.span("model"))]).decode("utf-8", "replace")
    pieces = [f"{{{head}:[".encode(), *([b","] * (2 * len(items) - 1))]
    pieces[1::2] = items
    pieces.append(f'],"model":{model},"usage":{usage}}}'.encode())
    return Prediction((yield from joined(pieces)), headers={"content-type": _JSON})
