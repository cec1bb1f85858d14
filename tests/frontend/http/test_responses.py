import json

import fakes
import pytest

from marserve.backend.protocol import Prediction
from marserve.frontend.errors import PredictionFailed, ServeError
from marserve.frontend.http.responses import (
    common_headers,
    error_response,
    json_response,
    json_text,
    prediction_response,
    text_response,
)
from marserve.frontend.http.router import Route


@pytest.fixture
def send():
    """How a prediction arrives at a client."""

    def sent(prediction, method="GET"):
        async def serve(_request):
            return prediction_response(prediction)

        return fakes.exchange({"a": Route(serve)}, fakes.request("/a", method))

    return sent


# -- the JSON house style --------------------------------------------------------------------------


def test_json_is_indented_by_two_ends_with_a_newline_and_leaves_nulls_out():
    document = {"b": None, "a": [{"x": None, "y": 1}], "ä": "grün"}
    assert json_text(document) == (
        '{\n  "a": [\n    {\n      "y": 1\n    }\n  ],\n  "ä": "grün"\n}\n'
    )


def test_members_stay_in_their_order():
    assert list(json.loads(json_text({"z": 1, "a": 2}))) == ["z", "a"]


@pytest.mark.parametrize(
    ("answer", "content_type", "body"),
    [
        (json_response({"a": 1}), "application/json", b'{\n  "a": 1\n}\n'),
        (text_response("grün", "text/x"), "text/x", "grün".encode()),
    ],
)
def test_documents_carry_their_content_type(answer, content_type, body):
    async def serve(_request):
        return answer

    seen = fakes.exchange({"a": Route(serve)}, fakes.request("/a"))
    assert (seen.headers["content-type"], seen.body) == (content_type, body)


def test_a_failure_without_a_message_has_no_such_member():
    async def serve(_request):
        return error_response(ServeError())

    document = fakes.exchange({"a": Route(serve)}, fakes.request("/a")).document
    assert document == {"code": 500, "type": "InternalServerException"}


@pytest.mark.parametrize(
    ("status", "line"), [(299, "HTTP/1.1 299 "), (404, "HTTP/1.1 404 Not Found")]
)
def test_a_failure_has_the_workers_status_known_or_not(status, line):
    async def serve(_request):
        raise PredictionFailed("no", status=status)

    assert fakes.exchange({"a": Route(serve)}, fakes.request("/a")).status_line == line


# -- predictions -----------------------------------------------------------------------------------


def test_a_plain_prediction_has_no_content_type_and_no_phrase(send):
    answer = send(Prediction(b"cat"))
    assert answer.status_line == "HTTP/1.1 200 "
    assert answer.body == b"cat"
    assert answer.headers.keys() == {"x-request-id", "content-length", "connection"}
    assert answer.headers["content-length"] == "3"


def test_a_handler_sets_status_phrase_and_headers(send):
    answer = send(Prediction(b"tea", 418, "My Phrase", {"Content-Type": "text/tea", "x-o": "ö"}))
    assert answer.status_line == "HTTP/1.1 418 My Phrase"
    assert (answer.headers["content-type"], answer.headers["x-o"]) == ("text/tea", "ö")
    assert (answer.body, answer.headers["connection"]) == (b"tea", "close")


@pytest.mark.parametrize(
    "name", ["Content-Length", "transfer-encoding", "CONNECTION", "x-request-id"]
)
def test_a_handler_cannot_set_the_framing(name, send):
    answer = send(Prediction(b"body", headers={name: "99"}))
    assert answer.raw.lower().count(name.lower().encode() + b":") == (
        0 if name == "transfer-encoding" else 1
    )
    assert "99" not in answer.headers.values()
    assert answer.body == b"body"


@pytest.mark.parametrize(
    "prediction",
    [
        Prediction(b"", headers={"a": "b\r\nset-cookie: x"}),
        Prediction(b"", headers={"a\nb": "c"}),
        Prediction(b"", headers={"a": "b\n"}),
        Prediction(b"", reason="ok\r\n\r\n<html>"),
        Prediction(b"", status=199),
        Prediction(b"", status=0),
        Prediction(b"", status=-1),
        Prediction(b"", status=1000),
        Prediction(b"", headers={"a": "\ud800"}),
        Prediction(b"", headers={"a: b": "c"}),
    ],
)
def test_what_http_cannot_carry_is_refused_with_a_reason(prediction, send):
    answer = send(prediction)
    assert answer.status == 500
    assert answer.document["message"].startswith("The handler set ")


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_is_sent_without_one(status, send):
    answer = send(Prediction(b"HTTP/1.1 200 smuggled\r\n\r\n", status))
    assert (answer.status, answer.body) == (status, b"")


def test_head_is_answered_by_the_headers_alone(send):
    answer = send(Prediction(b"cat"), "HEAD")
    assert (answer.headers["content-length"], answer.body) == ("3", b"")


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 64 * 1024 + 1, 3_000_000])
def test_a_body_of_any_size_arrives(size, send):
    answer = send(Prediction(b"x" * size))
    assert answer.headers["content-length"] == str(size)
    assert answer.body == b"x" * size


# -- the common headers ----------------------------------------------------------------------------


def test_nothing_is_cached_and_only_the_configured_cors_headers_are_sent():
    lines = common_headers(
        {"access-control-allow-origin": "*", "access-control-allow-methods": None}
    )
    assert lines.splitlines() == [
        "Pragma: no-cache",
        "Cache-Control: no-cache; no-store, must-revalidate, private",
        "Expires: Thu, 01 Jan 1970 00:00:00 UTC",
        "access-control-allow-origin: *",
    ]
    assert lines.endswith("\r\n")
