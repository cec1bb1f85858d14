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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.configuration.setting_kinds import FLAG, TEXT, Kind, whole, word
from marserve.frontend.errors import BadRequest, PredictionFailed, ServeError
from marserve.frontend.operations.client_lists import rows_of
from marserve.frontend.operations.json_items import (
    SMALL_BYTES,
    UNREADABLE,
    items_at,
    object_members,
)

#: The rows of a request, and what joins the answers.
Rows = tuple[Sequence[Input], Callable[[Sequence[Prediction]], Steps[Prediction]]]

#: Members of a request, each as JSON.
Members = Mapping[str, bytes]
T = TypeVar("T")

_JSON = "application/json"
_EMBEDDING = ("input", "encoding_format", "dimensions")
_MEMBERS = ("model", *_EMBEDDING, "query", "documents", "top_n", "return_documents")
_TOKEN_IDS = re.compile(rb"\[\s*[-0-9]")


def _is_input(value: Any) -> bool:
    is_list = isinstance(value, list) and value != []
    return isinstance(value, str) or (is_list and all(type(token) is int for token in value))


_INPUT = Kind("a text, a list of texts, a list of token ids, or a list of those", _is_input)
_DOCUMENTS = Kind('a list of texts, or of objects {"text": "…"}', TEXT.accepts)
_FORM = word("float", "base64")
_UNSUPPORTED = Kind("not supported here", lambda _: False)
# The errors of an answer that is not as documented.
_UNUSABLE = (*UNREADABLE, TypeError, KeyError, OverflowError, struct.error)

_to_json = json.JSONEncoder(separators=(",", ":")).encode


def read_members(body: bytes) -> Steps[Members]:
    """Return the members of a request that the server reads; raises BadRequest."""
    try:
        found = yield from object_members(body, _MEMBERS)
    except UNREADABLE as error:
        what = "The body must be a JSON object, with the media type application/json."
        raise BadRequest(what) from error
    return {name: text for name, text in found.items() if text != b"null"}


def read_value(members: Members, name: str, kind: Kind, *default: Any) -> Any:
    """Return the value of a member, or raise BadRequest."""
    if default and name not in members:
        return default[0]
    text = members.get(name, b"null")
    if len(text) <= SMALL_BYTES or text.startswith(b'"'):
        with suppress(*UNREADABLE):
            if kind.accepts(value := json.loads(text)):
                return value
    raise _wrong(name, text, kind)


def _wrong(name: str, text: bytes, kind: Kind) -> BadRequest:
    return BadRequest(f"{name}={text[:80].decode('utf-8', 'replace')}: it is {kind.rule}.")


def embedding_rows(
    input_: Input, members: Members, max_rows: int, _hold: Callable[[int], object]
) -> Steps[Rows]:
    """Split a request into its inputs; raises BadRequest. Parameters as `reranking_rows`."""
    read_value(members, "dimensions", _UNSUPPORTED, None)
    is_packed = read_value(members, "encoding_format", _FORM, "") == "base64"
    text = members.get("input", b"")
    is_list = text.startswith(b"[") and not _TOKEN_IDS.match(text)
    items = (yield from _items(members, "input", _INPUT, max_rows)) if is_list else [text]
    for item in items:
        if len(item) <= SMALL_BYTES or not item.startswith(b"["):
            read_value({"input": item}, "input", _INPUT)
        yield

    def read(numbers: Any) -> str:
        if not isinstance(numbers, list) or not all(map(math.isfinite, numbers)):
            raise ValueError("no list of finite numbers")
        packed = struct.pack(f"<{len(numbers)}f", *numbers)
        return _to_json(base64.b64encode(packed).decode() if is_packed else numbers)

    def join(predictions: Sequence[Prediction]) -> Steps[Prediction]:
        found, tokens = yield from _read_answers(predictions, "embedding", read)
        form = '{"object":"embedding","index":%d,"embedding":%s}'
        data = [form % pair for pair in enumerate(found)]
        usage = _to_json({"prompt_tokens": tokens, "total_tokens": tokens})
        return _answer(members, '"object":"list","data"', data, usage)

    return _json_rows(input_, items), join


def reranking_rows(
    input_: Input, members: Members, max_rows: int, hold: Callable[[int], object]
) -> Steps[Rows]:
    """Split a request into pairs of the query and a document; raises BadRequest.

    Of more than ``max_rows`` one more is returned, so that the request is refused. ``hold`` is
    called with the bytes of the copies of the query, before they are made.
    """
    top = read_value(members, "top_n", whole(0), 0)
    has_documents = read_value(members, "return_documents", FLAG, True)
    read_value(members, "query", TEXT)
    query, documents = members["query"], []
    for item in (yield from _items(members, "documents", _DOCUMENTS, max_rows)):
        document = item
        if item.startswith(b"{"):
            with suppress(*UNREADABLE):
                document = (yield from object_members(item, ("text",))).get("text", item)
        read_value({"documents": document}, "documents", _DOCUMENTS)
        documents.append(document)
        yield
    hold(len(query) * len(documents))
    pairs = [b'{"query":%b,"document":%b}' % (query, document) for document in documents]

    def join(predictions: Sequence[Prediction]) -> Steps[Prediction]:
        scores, tokens = yield from _read_answers(predictions, "score", _read_score)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = []
        for index in order[: top or None]:
            document = documents[index].decode("utf-8", "replace")
            text = f',"document":{{"text":{document}}}' if has_documents else ""
            results.append(f'{{"index":{index},"relevance_score":{scores[index]}{text}}}')
            yield
        usage = _to_json({"total_tokens": tokens})
        return _answer(members, f'"id":{_to_json(input_.id)},"results"', results, usage)

    return _json_rows(input_, pairs), join


#: How a request is split, by the setting ``openai`` of the model.
SPLITTERS = {"embeddings": embedding_rows, "rerank": reranking_rows}


def _items(members: Members, name: str, kind: Kind, max_rows: int) -> Steps[list[bytes]]:
    text = members.get(name, b"")
    with suppress(*UNREADABLE):
        if text.startswith(b"["):
            items, _ = yield from items_at(text, 0, max_rows + 1)
            if items:
                return items
    raise _wrong(name, text, kind)


def _json_rows(input_: Input, bodies: Sequence[bytes]) -> Sequence[Input]:
    return rows_of(replace(input_, parts=[]), [Part("body", _JSON, body) for body in bodies])


def _read_score(score: Any) -> float:
    if type(score) not in (int, float) or not math.isfinite(score):
        raise ValueError("no finite number")
    return float(score)


def _read_answers(
    predictions: Sequence[Prediction], member: str, read: Callable[[Any], T]
) -> Steps[tuple[list[T], int]]:
    """Return what the answers to the rows hold, and their tokens; raises the error of a row."""
    found, tokens = [], 0
    for index, prediction in enumerate(predictions):
        body = bytes(prediction.body)
        if prediction.status != 200:
            text = body.decode("utf-8", "replace")
            status = prediction.status if prediction.status >= 400 else 503
            raise PredictionFailed(f"Item {index}: {text}", status=status)
        try:
            answer = json.loads(body)
            if isinstance(answer, dict):
                tokens += operator.index(answer.get("tokens", 0))
                answer = answer[member]
            found.append(read(answer))
        except _UNUSABLE as error:
            what = f"no {member}, or tokens that are no whole number"
            raise ServeError(f"The handler's answer to item {index} has {what}.") from error
        yield
    return found, tokens


def _answer(members: Members, head: str, items: Iterable[str], usage: str) -> Prediction:
    model = members["model"].decode("utf-8", "replace")
    text = f'{{{head}:[{",".join(items)}],"model":{model},"usage":{usage}}}'
    return Prediction(text.encode(), headers={"content-type": _JSON})
