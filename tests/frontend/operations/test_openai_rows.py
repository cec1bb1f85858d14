"""Requests for embeddings and reranking as rows of a model, and their joint answers."""

import json
from typing import Any

import pytest
from steps import result_of

from marserve.backend.protocol import Input, Part, Prediction
from marserve.frontend.aio.json_items import SMALL_BYTES
from marserve.frontend.batching.rows import in_blocks
from marserve.frontend.errors import BadRequest, PredictionFailed, ServeError
from marserve.frontend.operations.openai_rows import (
    Rows,
    embedding_rows,
    read_members,
    reranking_rows,
)

MAX_ROWS = 10
COPIES = 2  # of the query, at the same time
LARGE = SMALL_BYTES * 2


def split(rows: Any, hold: Any = int, **members: Any) -> Rows:
    body = json.dumps({"model": "m", **members}).encode()
    headers = {"content-type": "text/plain", "content-length": str(len(body)), "x-mine": "1"}
    input_ = Input("id", headers, [Part("body", "text/plain", body)])
    steps = rows(input_, result_of(read_members(body)), MAX_ROWS, COPIES)
    found: Rows = result_of(steps, hold)
    return found


def bodies(rows: Rows) -> list[Any]:
    sent, _ = in_blocks(rows[0])
    return [json.loads(bytes(part.body)) for row in sent for part in row.parts]


def answer(rows: Rows, *answers: Any) -> Any:
    joined = result_of(rows[1]([Prediction(json.dumps(each).encode()) for each in answers]))
    assert joined.headers == {"content-type": "application/json"}
    return json.loads(bytes(joined.body))


@pytest.mark.parametrize(
    ("input_", "rows"),
    [
        ("a text", ["a text"]),
        ("", [""]),
        (["é", "b"], ["é", "b"]),
        ([1, 2], [[1, 2]]),
        ([-1], [[-1]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]),
        ("x" * LARGE, ["x" * LARGE]),
        (["x" * LARGE, "y"], ["x" * LARGE, "y"]),
        ([7] * LARGE, [[7] * LARGE]),
    ],
)
def test_an_input_is_a_row(input_, rows):
    assert bodies(split(embedding_rows, input=input_)) == rows


def test_a_row_is_a_request_with_json_of_its_own():
    (first, second), _ = split(embedding_rows, input=["a", "bc"])
    assert (first.id, second.id) == ("id.0", "id.1")
    assert [part.content_type for part in first.parts] == ["application/json"]
    assert second.headers["x-mine"] == "1"
    assert second.headers["content-type"] == "application/json"
    assert second.headers["content-length"] == "4"


def test_of_too_many_inputs_one_more_than_allowed_is_a_row():
    assert len(split(embedding_rows, input=["a"] * 50)[0]) == MAX_ROWS + 1
    assert len(split(reranking_rows, query="q", documents=["a"] * 50)[0]) == MAX_ROWS + 1


def test_members_that_are_null_count_as_missing():
    rows = split(embedding_rows, input="a", dimensions=None, encoding_format=None)
    assert answer(rows, [1])["data"][0]["embedding"] == [1]


def test_what_begins_like_null_does_not_count_as_missing():
    members = result_of(read_members(b'{"model": "m", "input": "a", "encoding_format": nullx}'))
    with pytest.raises(BadRequest, match="encoding_format=nullx"):
        result_of(embedding_rows(Input("id", {}, []), members, MAX_ROWS, COPIES))


@pytest.mark.parametrize("wrong", [b"a\nb", b"\\q", b"\xff", b"\xc3"])
@pytest.mark.parametrize(
    ("rows", "form", "name"),
    [
        (embedding_rows, b'"input": "%b"', "input"),
        (embedding_rows, b'"input": ["a", "%b"]', "input"),
        (reranking_rows, b'"query": "%b", "documents": ["a"]', "query"),
        (reranking_rows, b'"query": "q", "documents": [{"text": "%b"}]', "documents"),
    ],
)
def test_a_large_text_that_is_no_json_is_refused(rows, form, name, wrong):
    text = b"x" * LARGE + wrong
    members = result_of(read_members(b'{"model": "m", %b}' % (form % text)))
    with pytest.raises(BadRequest, match=name):
        result_of(rows(Input("id", {}, []), members, MAX_ROWS, COPIES))


def test_tokens_are_counted_where_the_handler_gives_them():
    rows = split(embedding_rows, input=["a", "b"])
    found = answer(rows, {"embedding": [0.5], "tokens": 3}, {"embedding": []})
    assert found["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert [each["embedding"] for each in found["data"]] == [[0.5], []]


@pytest.mark.parametrize(
    "wrong",
    [
        "text",
        None,
        7,
        ["a"],
        [[1]],
        {},
        {"embedding": 1},
        [1e300],
        {"embedding": [], "tokens": "1"},
    ],
)
def test_an_answer_that_is_no_embedding_is_the_handlers_fault(wrong):
    with pytest.raises(ServeError, match="item 1 has no embedding"):
        answer(split(embedding_rows, input=["a", "b"]), [1.0], wrong)


@pytest.mark.parametrize("wrong", ["0.5", None, [], {}, {"score": None}, float("nan"), True])
def test_an_answer_that_is_no_score_is_the_handlers_fault(wrong):
    with pytest.raises(ServeError, match="item 0 has no score"):
        answer(split(reranking_rows, query="q", documents=["a"]), wrong)


def test_a_row_with_a_status_fails_the_request_with_it():
    _, join = split(embedding_rows, input=["a", "b", "c"])
    predictions = [Prediction(b"[1]"), Prediction(b"not that", status=451)]
    with pytest.raises(PredictionFailed, match="Item 1: not that") as caught:
        result_of(join(predictions))
    assert caught.value.status == 451


def test_a_query_and_a_document_are_a_row():
    documents = ["a", {"text": "b", "title": "t"}, "x" * LARGE, {"text": "y" * LARGE}]
    rows = split(reranking_rows, query="q", documents=documents)
    texts = ["a", "b", "x" * LARGE, "y" * LARGE]
    assert bodies(rows) == [{"query": "q", "document": text} for text in texts]
    found = answer(rows, 1, {"score": 2, "tokens": 5}, 1, -0.5)
    assert found["id"] == "id"
    assert [each["index"] for each in found["results"]] == [1, 0, 2, 3]  # equals in their order
    assert [each["document"]["text"] for each in found["results"]] == ["b", "a", *texts[2:]]
    assert found["usage"] == {"total_tokens": 5}


def test_a_document_may_have_bytes_that_are_no_utf_8():
    """Python's parser accepts encoded surrogates."""
    body = b'{"model": "m", "query": "q", "documents": ["\xed\xa0\x80"]}'
    members = result_of(read_members(body))
    rows = result_of(reranking_rows(Input("id", {}, []), members, MAX_ROWS, COPIES))
    [found] = answer(rows, 1)["results"]
    assert set(found["document"]["text"]) == {"\ufffd"}


@pytest.mark.parametrize(("top", "count"), [(None, 3), (0, 3), (2, 2), (9, 3)])
def test_the_best_are_returned(top, count):
    rows = split(reranking_rows, query="q", documents=["a", "b", "c"], top_n=top)
    assert len(answer(rows, 1, 2, 3)["results"]) == count


def test_the_query_is_copied_and_counted_for_the_pairs_that_are_sent_at_a_time():
    def counted(query):
        counts = []
        split(reranking_rows, counts.append, query=query, documents=["a", "b", "c"])
        return sum(counts)

    assert counted("q" * LARGE) - counted("q") == COPIES * (LARGE - 1)


def test_a_pair_of_another_query_is_another_content():
    (one, *_), _ = split(reranking_rows, query="q", documents=["a"])
    (other, *_), _ = split(reranking_rows, query="Q", documents=["a"])
    assert [part.body for part in one.parts] != [part.body for part in other.parts]


def test_a_pair_has_the_length_of_its_body():
    (first, second), _ = split(reranking_rows, query="q", documents=["a", "bc"])
    lengths = [len(row.parts[0].body) for row in in_blocks([first, second])[0]]
    assert [row.headers["content-length"] for row in (first, second)] == [str(n) for n in lengths]


@pytest.mark.parametrize(
    ("rows", "members", "words"),
    [
        (embedding_rows, {}, "input="),
        (embedding_rows, {"input": [[1], "a", 7]}, "input=7"),
        (embedding_rows, {"input": [["x"] * 3]}, "input="),
        (embedding_rows, {"input": {"x": "y" * LARGE}}, "input="),
        (embedding_rows, {"input": "a", "dimensions": [[]] * LARGE}, "dimensions="),
        (reranking_rows, {"documents": ["a"]}, "query=null"),
        (reranking_rows, {"query": ["a"], "documents": ["a"]}, "query="),
        (reranking_rows, {"query": "a"}, "documents="),
        (reranking_rows, {"query": "a", "documents": ["a", {"text": 1}]}, "documents=1"),
        (reranking_rows, {"query": "a", "documents": [{"x": "y" * LARGE}]}, "documents="),
    ],
)
def test_a_wrong_member_is_named_with_a_part_of_it(rows, members, words):
    with pytest.raises(BadRequest) as caught:
        split(rows, **members)
    assert words in caught.value.message
    assert len(caught.value.message) < 250
