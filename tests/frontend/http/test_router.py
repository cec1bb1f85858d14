import json
import logging

import fakes
import pytest

from marserve.frontend.errors import (
    BadRequest,
    MethodNotAllowed,
    NoWorker,
    PayloadTooLarge,
    PredictionFailed,
    ServeError,
)
from marserve.frontend.http.limits import ConnectionLimits
from marserve.frontend.http.requests import HttpRequest
from marserve.frontend.http.responses import HttpResponse, json_response, refusal_response
from marserve.frontend.http.router import Route
from marserve.frontend.security.tokens import TokenStore
from marserve.frontend.telemetry.metrics import Metrics


async def show(request: HttpRequest) -> HttpResponse:
    return json_response({"segments": list(request.segments), "id": request.id})


ROUTES = {"a": Route(show), "": Route(show)}


def raising(error: Exception) -> dict[str, Route]:
    async def fail(_request: HttpRequest) -> HttpResponse:
        raise error

    return {"a": Route(fail)}


# -- paths -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "segments"),
    [
        ("/a", ["a"]),
        ("/a/b/c", ["a", "b", "c"]),
        ("/a/", ["a"]),
        ("/a///", ["a"]),
        ("/a//b", ["a", "", "b"]),
        ("/a/b%20c", ["a", "b c"]),
        ("/a/%C3%A4", ["a", "ä"]),
        ("/%61/b", ["a", "b"]),
        ("/a/b%2Fc", ["a", "b", "c"]),
        ("/a/%2e%2e", ["a", ".."]),
        ("/a/100%", ["a", "100%"]),
        ("/a/b+c", ["a", "b+c"]),
        ("/a?x=/y/z", ["a"]),
        ("/", []),
        ("/?x", []),
        ("http://localhost:1/a/b?x", ["a", "b"]),
        ("http://localhost", []),
    ],
)
def test_a_path_is_decoded_and_then_split(target, segments):
    answer = fakes.exchange(ROUTES, fakes.request(target))
    assert answer.document["segments"] == segments


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "QUERY"])
def test_a_route_decides_about_methods_itself(method):
    assert fakes.exchange(ROUTES, fakes.request("/a", method)).status == 200


@pytest.mark.parametrize("target", ["/b", "/A", "/ab", "//a", "*"])
def test_an_unknown_path_is_not_found(target):
    answer = fakes.exchange({"a": Route(show)}, fakes.request(target, "OPTIONS"))
    assert (answer.status, answer.document) == (
        404,
        {
            "code": 404,
            "type": "ResourceNotFoundException",
            "message": "Requested resource is not found, please refer to API document.",
        },
    )


# -- what every answer has -------------------------------------------------------------------------


def test_every_answer_has_an_id_of_its_own_and_the_common_headers():
    first, second = (
        fakes.exchange(ROUTES, fakes.request("/a"), common_headers="x-common: 1\r\n")
        for _ in range(2)
    )
    assert first.headers["x-request-id"] == first.document["id"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.headers["x-common"] == "1"


def test_requests_follow_each_other_on_one_connection():
    keep = b"GET /a HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = fakes.exchange(ROUTES, keep, fakes.request("/a/last"))
    assert answer.raw.count(b"HTTP/1.1 200 OK") == 2
    assert answer.headers["connection"] == "keep-alive"
    assert b'"last"' in answer.raw


def test_after_an_error_the_connection_stays():
    keep = b"GET /gone HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = fakes.exchange(ROUTES, keep, fakes.request("/a/last"))
    assert answer.raw.count(b"HTTP/1.1 404 Not Found") == 1
    assert b'"last"' in answer.raw


@pytest.mark.parametrize(
    ("error", "status", "word"),
    [
        (BadRequest("no"), 400, "BadRequestException"),
        (MethodNotAllowed(), 405, "MethodNotAllowedException"),
        (NoWorker("no"), 503, "ServiceUnavailableException"),
        (ServeError("no", status=507), 507, "InternalServerException"),
    ],
)
def test_a_failure_becomes_the_body_that_clients_know(error, status, word):
    answer = fakes.exchange(raising(error), fakes.request("/a"))
    assert answer.status == status
    assert answer.document == {"code": status, "type": word, "message": error.message}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]


def in_another_format(error: ServeError) -> HttpResponse:
    return refusal_response({"oh": error.message}, error.status, {})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (BadRequest("no"), "no"),
        (KeyError("no"), "Internal server error."),
        (MemoryError(), "The server has not enough memory for this request."),
    ],
)
def test_a_route_may_have_its_own_format_of_failures(error, words):
    routes = {"a": Route(raising(error)["a"].serve, None, in_another_format)}
    assert fakes.exchange(routes, fakes.request("/a")).document == {"oh": words}


def test_a_message_that_cannot_be_encoded_keeps_its_status():
    answer = fakes.exchange(raising(PredictionFailed("\ud800", status=503)), fakes.request("/a"))
    assert (answer.status, answer.document["code"]) == (503, 503)


def test_the_answer_to_a_body_too_large_names_the_limit():
    answer = fakes.exchange(raising(PayloadTooLarge(7)), fakes.request("/a"))
    assert answer.status_line == "HTTP/1.1 413 Request Entity Too Large"
    assert answer.document == {
        "code": 413,
        "type": "PayloadTooLargeException",
        "message": "The request body is longer than max_request_size (7 bytes).",
    }


def test_an_unexpected_error_is_a_500_in_json_and_its_traceback_is_logged(caplog):
    answer = fakes.exchange(raising(KeyError("secret")), fakes.request("/a"))
    assert answer.document == {
        "code": 500,
        "type": "InternalServerException",
        "message": "Internal server error.",
    }
    assert "secret" in caplog.text
    assert "Traceback" in caplog.text


# -- what is no HTTP -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"GET /a HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /a HTTP/9.9\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: x\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /a HTTP/1.1\r\nHost: h\r\nLong: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_is_not_http_is_refused_in_json(sent):
    answer = fakes.exchange(ROUTES, sent)
    assert answer.document["code"] == 400
    assert answer.document["type"] == "BadRequestException"
    assert answer.document["message"].startswith("Invalid HTTP message: ")
    assert answer.headers["connection"] == "close"


# -- who may come in -------------------------------------------------------------------------------


@pytest.fixture
def tokens(tmp_path):
    store = TokenStore(tmp_path / "key_file.json", 60.0)
    store.write()
    return store


@pytest.fixture
def key(tokens):
    return lambda kind: f"Authorization: Bearer {json.loads(tokens.path.read_text())[kind]['key']}"


@pytest.mark.parametrize(
    ("kind", "sent", "status"),
    [
        (None, None, 200),
        ("inference", "inference", 200),
        ("inference", "management", 400),
        ("inference", None, 400),
        ("management", "management", 200),
        ("management", "API", 400),
    ],
)
def test_a_guarded_route_needs_its_own_kind_of_key(kind, sent, status, tokens, key):
    headers = [key(sent)] if sent else []
    answer = fakes.exchange(
        {"a": Route(show, kind)}, fakes.request("/a", "GET", b"", *headers), tokens=tokens
    )
    assert answer.status == status
    if status == 400:
        assert answer.document["type"] == "InvalidKeyException"


def test_a_guarded_route_refuses_in_its_own_format(tokens):
    routes = {"a": Route(show, "inference", in_another_format)}
    answer = fakes.exchange(routes, fakes.request("/a"), tokens=tokens)
    assert (answer.status, [*answer.document]) == (400, ["oh"])


def test_an_unknown_path_needs_no_key(tokens):
    assert fakes.exchange({}, fakes.request("/b"), tokens=tokens).status == 404


@pytest.mark.parametrize(
    ("kind", "local", "origin", "status"),
    [
        ("management", True, "Origin: http://evil.example", 403),
        ("management", True, "Sec-Fetch-Site: cross-site", 403),
        ("management", True, "Origin: http://localhost", 200),
        ("management", False, "Origin: http://evil.example", 200),
        ("inference", True, "Origin: http://evil.example", 200),
    ],
)
def test_web_pages_are_kept_from_management_that_is_for_this_machine(kind, local, origin, status):
    sent = fakes.request("/a", "POST", b"", origin)
    answer = fakes.exchange({"a": Route(show, kind)}, sent, local_management=local)
    assert answer.status == status


# -- what is noted ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "name"),
    [(None, "Requests2XX"), (BadRequest("no"), "Requests4XX"), (KeyError("no"), "Requests5XX")],
)
def test_every_answer_is_counted_and_logged(error, name, caplog):
    caplog.set_level(logging.INFO, logger="ACCESS_LOG")
    metrics = Metrics("host")
    routes = ROUTES if error is None else raising(error)
    answer = fakes.exchange(routes, fakes.request("/a?x=1", "PUT"), metrics=metrics)
    labels = {"Level": "Host", "Hostname": "host"}
    assert fakes.sample_value(metrics, name, labels) == 1
    [line] = [record.getMessage() for record in caplog.records if record.name == "ACCESS_LOG"]
    assert f'"PUT /a?x=1 HTTP/1.1" {answer.status} ' in line
    assert "- /127.0.0.1:" in line


@pytest.mark.parametrize(
    ("route", "status"),
    [
        (Route(show), b"503"),
        (Route(show, "inference"), b"503"),
        (Route(show, "inference", when_full=True), b"200"),
        (Route(show, "management"), b"200"),
    ],
)
def test_while_memory_is_full_only_health_and_management_are_served(route, status, listen):
    async def test(listener):
        usage = listener.server.usage
        usage.add(usage.client("1.1.1.1"), 2000)
        reader, writer = await listener.connect()
        writer.write(fakes.request("/a", "POST", b"body"))
        assert (await reader.readline()).split()[1] == status

    listen(test, {"a": route}, ConnectionLimits(max_bytes_in_flight=1000))
