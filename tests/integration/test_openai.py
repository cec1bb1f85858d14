"""OpenAI's API: models by the names in bodies, streams, errors, embeddings and reranking."""

import base64
import json
import struct

import pytest

pytestmark = pytest.mark.integration

# Answers with what it got; a stream is events, the last one after the gate of the request.
ENGINE = """
import asyncio
import json

from ts.handler_utils.utils import send_intermediate_predict_response


class Engine:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        body = data[0]["body"]
        path = context.get_request_header(0, "url_path")
        if "fail" in body:
            raise ValueError(body["fail"])
        if "hold" in body:
            await asyncio.to_thread(lambda: open(body["hold"]).read())
        if not body.get("stream"):
            context.set_response_content_type(0, "application/json")
            return [json.dumps({"path": path, "body": body, "version": VERSION})]
        context.set_response_content_type(0, "text/event-stream")
        for number in range(2):
            piece = [f"data: {number}\\n\\n"]
            send_intermediate_predict_response(piece, context.request_ids, "", 200, context)
        if "gate" in body:
            await asyncio.to_thread(lambda: open(body["gate"]).read())
        return ["data: [DONE]\\n\\n"]
"""
SERVER = """
asyncCommunication: true
openai: server
handler:
  vllm_engine_config: {served_model_name: [org/served, short]}
  adapters: {french: adapters/french, german: adapters/german}
"""
EMBEDDER = """
def handle(data, context):
    if data is None:
        return None
    rows = [row["body"] for row in data]
    if "refuse" in rows:
        context.set_response_status(422, "No", rows.index("refuse"))
    found = []
    for row in rows:
        vector = [float(len(row)), float(len(data)), -0.5]
        found.append(vector if row == "bare" else {"embedding": vector, "tokens": len(row)})
        found[-1] = "nothing" if row == "wrong" else found[-1]
    return found
"""
RERANKER = """
def handle(data, context):
    if data is None:
        return None
    pairs = [row["body"] for row in data]
    return [
        {"score": pair["document"].count(pair["query"]), "tokens": 2} for pair in pairs
    ]
"""
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def models(server):
    server.install(ENGINE.replace("VERSION", "1"), "chat", SERVER)
    server.install(EMBEDDER, "embed", "openai: embeddings\n", batch_size=8, max_batch_delay=0)
    server.install(RERANKER, "rank", "openai: rerank\n", batch_size=8, max_batch_delay=0)
    server.install(EMBEDDER, "plain")
    return server


def post(server, path, **kwargs):
    return server.inference("POST", path, **kwargs)


def error_of(answer, status):
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json().keys() == {"error"}
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] is None
    return error


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chat", "chat:1.0", "org/served", "short", "french", "german"])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/v1/embeddings"])
def test_an_engine_gets_path_and_body_by_each_of_its_names(models, name, path):
    body = {"model": name, "messages": [{"role": "user", "content": "ü"}], "n": 1}
    answer = post(models, path, json=body)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    assert answer.json() == {"path": path[1:], "body": body, "version": 1}


def test_the_path_of_a_model_gives_the_same(models):
    body = {"model": "chat"}
    answers = [post(models, path, json=body) for path in (CHAT, f"/predictions/chat/1.0{CHAT}")]
    assert answers[0].json() == answers[1].json()


def test_models_are_listed_for_kserve_and_openai(models):
    document = models.inference("GET", "/v1/models").json()
    assert document["models"] == ["chat", "embed", "plain", "rank"]
    assert document["object"] == "list"
    assert {each["id"] for each in document["data"]} == {
        *("chat", "chat:1.0", "org/served", "short", "french", "german"),
        *("embed", "embed:1.0", "rank", "rank:1.0"),
    }
    assert len(document["data"]) == 10
    for each in document["data"]:
        assert (each["object"], each["owned_by"]) == ("model", "marserve")
        assert isinstance(each["created"], int)


def test_a_model_is_retrieved_by_each_of_its_names(models):
    listed = models.inference("GET", "/v1/models").json()["data"]
    for each in listed:
        answer = models.inference("GET", f"/v1/models/{each['id']}")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"name": each["id"], "ready": True, **each}
    escaped = models.inference("GET", "/v1/models/org%2Fserved").json()
    assert escaped["id"] == "org/served"
    answer = models.inference("GET", "/v1/models/nobody")
    assert (answer.status_code, answer.json()["error"]) == (404, "Model not found: nobody")


def test_a_new_default_version_is_the_one_of_the_name(models, make_archive):
    name = "versions"
    models.install(ENGINE.replace("VERSION", "1"), name, "asyncCommunication: true\n")
    config = "asyncCommunication: true\nopenai: server\nhandler: {served_model_name: newest}\n"
    archive = make_archive(
        models.store, ENGINE.replace("VERSION", "2"), "second", config, version="2.0"
    )
    made = models.register(archive, model_name=name, initial_workers=1)
    assert made.status_code == 200, made.text
    try:
        assert "openai: none" in error_of(post(models, CHAT, json={"model": name}), 404)["message"]
        for known in (f"{name}:2.0", "newest"):
            assert post(models, CHAT, json={"model": known}).json()["version"] == 2
        assert models.management("PUT", f"/models/{name}/2.0/set-default").status_code == 200
        assert post(models, CHAT, json={"model": name}).json()["version"] == 2
    finally:
        models.management("PUT", f"/models/{name}/2.0/set-default")
        for version in ("1.0", "2.0"):
            assert models.management("DELETE", f"/models/{name}/{version}").status_code == 200


def test_vllm_handler_offers_the_api_unless_its_yaml_does_not(models, make_archive):
    config = "handler: {model_path: org/model, adapters: {lora: x}}\n"
    for yaml, names in (
        (config, {"llm", "llm:1.0", "org/model", "lora"}),
        ("openai: none\n", set()),
    ):
        archive = make_archive(models.store, "vllm_handler", "llm", yaml)
        assert models.register(archive, initial_workers=0).status_code == 200
        listed = {each["id"] for each in models.inference("GET", "/v1/models").json()["data"]}
        assert {name for name in listed if "l" in name[:2] or "org/m" in name} == names
        models.management("DELETE", "/models/llm")


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}])
def test_a_stream_arrives_as_events(models, headers):
    body = {"model": "chat", "stream": True}
    answer = post(models, CHAT, json=body, headers=headers, stream=True)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text == "data: 0\n\ndata: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}])
def test_a_client_that_leaves_ends_its_stream(models, headers, gate):
    body = {"model": "chat", "stream": True, "gate": gate.path}
    with post(models, CHAT, json=body, headers=headers, stream=True) as answer:
        gate.wait_entered()
        lines = answer.iter_lines()
        assert next(lines) == b"data: 0"
        models.wait_taken("chat", 1)
    models.wait_taken("chat", 0)
    gate.open()


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}])
@pytest.mark.parametrize(
    ("path", "body", "status", "code", "words"),
    [
        (CHAT, b'{"model": "nobody"}', 404, "model_not_found", "nobody"),
        (CHAT, b'{"model": "chat:9"}', 404, "model_not_found", "chat:9"),
        (CHAT, b'{"model": "embed"}', 404, "ResourceNotFoundException", "openai: embeddings"),
        ("/v1/rerank", b'{"model": "embed"}', 404, "ResourceNotFoundException", "/v1/rerank"),
        (CHAT, b'{"model": "plain"}', 404, "ResourceNotFoundException", "openai: none"),
        (CHAT, b"hello", 400, "BadRequestException", "JSON object"),
        (CHAT, b"", 400, "BadRequestException", "JSON object"),
        (CHAT, b"[]", 400, "BadRequestException", "JSON object"),
        (CHAT, b'{"model": "chat"} more', 400, "BadRequestException", "JSON object"),
        (CHAT, b'{"messages": []}', 400, "BadRequestException", "model"),
        (CHAT, b'{"model": 7}', 400, "BadRequestException", "model=7"),
        (CHAT, b'{"model": "chat", "fail": "on purpose"}', 503, "InternalServerException", ""),
    ],
)
def test_errors_have_the_shape_of_openai(models, headers, path, body, status, code, words):
    kind = {"Content-Type": "application/json", **headers}
    error = error_of(post(models, path, data=body, headers=kind), status)
    assert error["code"] == code
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert words in error["message"]


def test_forms_and_other_methods_are_refused(models):
    error = error_of(post(models, CHAT, data={"model": "chat"}), 400)
    assert "media type application/json" in error["message"]
    for method in ("GET", "PUT", "DELETE"):
        assert error_of(models.inference(method, CHAT), 405)["type"] == "invalid_request_error"
    assert models.inference("OPTIONS", CHAT).status_code == 200
    assert "error" not in post(models, "/v1/audio/speech", json={}).json()


def test_limits_and_options_apply(models, gate, background):
    name = "full"
    handler = ENGINE.replace("VERSION", "1")
    config = SERVER.split("handler:")[0] + "outstandingBatches: 1\njobQueueSize: 1\n"
    models.install(handler, name, config)
    body = {"model": name, "stream": True, "gate": gate.path}
    running = background(post, models, CHAT, json=body)
    gate.wait_entered()
    waiting = background(post, models, CHAT, json={"model": name})
    models.wait_queued(name, 1)
    refused = post(models, CHAT, json={"model": name})
    assert "queue is full" in error_of(refused, 503)["message"]
    assert int(refused.headers["retry-after"]) >= 1
    late = post(models, CHAT, json={"model": name}, headers={"X-Timeout-Ms": "soon"})
    assert "X-Timeout-Ms" in error_of(late, 400)["message"]
    gate.open()
    assert (running.result().status_code, waiting.result().status_code) == (200, 200)
    models.management("PUT", f"/models/{name}?min_worker=0&max_worker=0&synchronous=true")
    assert "no worker" in error_of(post(models, CHAT, json={"model": name}), 503)["message"]
    models.management("DELETE", f"/models/{name}")


def test_a_large_body_for_a_full_model_is_refused_before_it_is_received(
    start_server, make_gate, background
):
    handler = ENGINE.replace("VERSION", "1")
    config = SERVER.split("handler:")[0] + "outstandingBatches: 1\njobQueueSize: 1\n"
    gate = make_gate()
    heads = [
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{field}\r\n\r\n".encode()
        for field in ("content-length: 5000000", "transfer-encoding: chunked")
    ]
    with start_server() as server:
        server.install(handler, "only", config)
        running = background(post, server, CHAT, json={"model": "only", "hold": gate.path})
        gate.wait_entered()
        waiting = background(post, server, CHAT, json={"model": "only"})
        server.wait_queued("only", 1)
        for head in heads:
            answer = server.exchange("inference", head, b"queue is full")
            assert answer.startswith(b"HTTP/1.1 503 ")
        gate.open()
        assert (running.result().status_code, waiting.result().status_code) == (200, 200)


def test_a_deadline_applies(models, gate):
    body = {"model": "chat", "hold": gate.path}
    late = post(models, CHAT, json=body, headers={"X-Timeout-Ms": "50"})
    assert error_of(late, 504)["code"] == "RequestTimeoutException"
    gate.open()


def test_a_key_is_needed_where_keys_are_on(start_server):
    with start_server(disable_token_authorization="false", enable_model_api="true") as server:
        keys = json.loads((server.directory / "key_file.json").read_text())
        inference, management = (
            {"Authorization": f"Bearer {keys[kind]['key']}"} for kind in ("inference", "management")
        )
        for path in (CHAT, "/v1/embeddings"):
            for headers in ({}, management):
                answer = post(server, path, json={"model": "m"}, headers=headers)
                assert error_of(answer, 400)["code"] == "InvalidKeyException"
            answer = post(server, path, json={"model": "m"}, headers=inference)
            assert error_of(answer, 404)["code"] == "model_not_found"
        assert error_of(server.inference("GET", "/v1/models"), 400)["code"] == "InvalidKeyException"
        listed = server.inference("GET", "/v1/models", headers=inference)
        assert listed.json() == {"models": [], "object": "list", "data": []}


# -- embeddings ------------------------------------------------------------------------------------


def embed(server, input_, **members):
    return post(server, "/v1/embeddings", json={"model": "embed", "input": input_, **members})


@pytest.mark.parametrize(
    ("input_", "lengths"),
    [
        ("text", [4]),
        (["a", "bc", "def"], [1, 2, 3]),
        ([5, 6, 7], [3]),
        ([[5, 6], [7]], [2, 1]),
    ],
)
def test_each_input_is_a_row_of_a_batch(models, input_, lengths):
    answer = embed(models, input_, user="me")
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": [length, len(lengths), -0.5]}
            for index, length in enumerate(lengths)
        ],
        "model": "embed",
        "usage": {"prompt_tokens": sum(lengths), "total_tokens": sum(lengths)},
    }


def test_embeddings_come_as_base64_of_float32(models):
    [found] = embed(models, ["bare"], encoding_format="base64").json()["data"]
    assert struct.unpack("<3f", base64.b64decode(found["embedding"])) == (4.0, 1.0, -0.5)
    plain = embed(models, ["bare"], encoding_format="float").json()
    assert plain["data"][0]["embedding"] == [4.0, 1.0, -0.5]
    assert plain["usage"] == {"prompt_tokens": 0, "total_tokens": 0}


def test_a_long_list_of_large_texts_is_read(models):
    texts = [letter * 30_000 for letter in "abcdefgh"] + ["x" * 100_000]
    data = embed(models, texts).json()["data"]
    assert [each["embedding"][0] for each in data] == [30_000] * 8 + [100_000]
    tokens = embed(models, list(range(30_000))).json()
    assert tokens["data"][0]["embedding"][0] == 30_000


@pytest.mark.parametrize(
    ("input_", "members", "words"),
    [
        ([], {}, "input=[]"),
        ([[]], {}, "input=[]"),
        ([1, "a"], {}, "input="),
        ([["a"]], {}, "input="),
        ({"a": 1}, {}, "input="),
        (None, {}, "input="),
        ([True], {}, "input="),
        ("a", {"encoding_format": "int8"}, "encoding_format="),
        ("a", {"dimensions": 256}, "dimensions=256"),
    ],
)
def test_a_wrong_member_is_named(models, input_, members, words):
    assert words in error_of(embed(models, input_, **members), 400)["message"]


def test_a_row_that_fails_fails_the_request(models):
    error = error_of(embed(models, ["a", "refuse", "b"]), 422)
    assert error["message"].startswith("Item 1")
    assert "item 0 has no embedding" in error_of(embed(models, ["wrong"]), 500)["message"]


def test_predictions_of_such_a_model_stay_as_they_are(models):
    answer = models.predict("embed", json="text")
    assert answer.json() == {"embedding": [4.0, 1.0, -0.5], "tokens": 4}


# -- reranking -------------------------------------------------------------------------------------


def rerank(server, documents, **members):
    body = {"model": "rank", "query": "a", "documents": documents, **members}
    return post(server, "/v1/rerank", json=body)


def test_documents_come_by_score(models):
    answer = rerank(models, ["b", "aa", {"text": "ba", "title": "x"}])
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document.pop("id")
    assert document == {
        "results": [
            {"index": 1, "relevance_score": 2.0, "document": {"text": "aa"}},
            {"index": 2, "relevance_score": 1.0, "document": {"text": "ba"}},
            {"index": 0, "relevance_score": 0.0, "document": {"text": "b"}},
        ],
        "model": "rank",
        "usage": {"total_tokens": 6},
    }
    few = rerank(models, ["b", "aa", "ba"], top_n=2, return_documents=False).json()["results"]
    assert few == [{"index": 1, "relevance_score": 2.0}, {"index": 2, "relevance_score": 1.0}]


@pytest.mark.parametrize(
    ("documents", "members", "words"),
    [
        ([], {}, "documents=[]"),
        ("a", {}, "documents="),
        ([1], {}, "documents=1"),
        ([{"title": "a"}], {}, "documents="),
        (["a"], {"query": None}, "query=null"),
        (["a"], {"top_n": -1}, "top_n=-1"),
        (["a"], {"return_documents": "no"}, "return_documents="),
    ],
)
def test_a_wrong_member_of_reranking_is_named(models, documents, members, words):
    assert words in error_of(rerank(models, documents, **members), 400)["message"]
