"""What the client gets: bodies, headers, status lines, errors."""

import http.client
import json

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.quick]

EVERY_TYPE = """
RESULTS = {
    "bytes": b"\\x00\\xff",
    "bytearray": bytearray(b"\\x00\\xff"),
    "str": "gr\\u00fc\\u00dfe",
    "dict": {"k": [1, "\\u00fc", None]},
    "list": [1, 2],
    "int": 7,
    "float": 0.5,
    "bool": True,
    "none": None,
    "nan": float("nan"),
    "empty": b"",
    "large": b"x" * 3_000_000,
}

def handle(data, context):
    return None if data is None else [RESULTS[row["body"]] for row in data]
"""

NO_CACHE = {
    "Pragma": "no-cache",
    "Cache-Control": "no-cache; no-store, must-revalidate, private",
    "Expires": "Thu, 01 Jan 1970 00:00:00 UTC",
}


@pytest.fixture(scope="module", autouse=True)
def models(server, handlers):
    server.install(EVERY_TYPE, "types")
    server.install(handlers / "lab.py", "lab")
    server.install(handlers / "lab.py", "batch3", batch_size=3, max_batch_delay=60_000)


@pytest.mark.parametrize(
    ("result", "body"),
    [
        ("bytes", b"\x00\xff"),
        ("bytearray", b"\x00\xff"),
        ("str", "grüße".encode()),
        ("dict", b'{\n  "k": [\n    1,\n    "\\u00fc",\n    null\n  ]\n}'),
        ("list", b"[\n  1,\n  2\n]"),
        ("int", b"7"),
        ("float", b"0.5"),
        ("bool", b"true"),
        ("none", b"null"),
        ("nan", b"NaN"),
        ("empty", b""),
        ("large", b"x" * 3_000_000),
    ],
)
def test_the_body_follows_the_type_of_the_result(server, result, body):
    answer = server.predict("types", data=result, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 200
    assert answer.content == body
    assert "content-type" not in answer.headers


def status_and_headers(server, listener, path):
    connection = http.client.HTTPConnection("127.0.0.1", server.ports[listener], timeout=20)
    try:
        connection.request("POST", path, body=b"{}", headers={"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.reason, dict(answer.getheaders())
    finally:
        connection.close()


def test_headers_of_a_prediction(server):
    status, reason, headers = status_and_headers(server, "inference", "/predictions/lab")
    assert (status, reason) == (200, "")
    assert headers.pop("x-request-id")
    assert headers.pop("content-length")
    assert headers == NO_CACHE | {"connection": "keep-alive"}


@pytest.mark.parametrize(
    ("listener", "path", "expected"),
    [
        ("inference", "/predictions/nobody", (404, "Not Found", "keep-alive")),
        ("management", "/models/nobody", (405, "Method Not Allowed", "keep-alive")),
        ("inference", "/ping", (200, "OK", "keep-alive")),
    ],
)
def test_headers_of_the_servers_own_answers(server, listener, path, expected):
    status, reason, headers = status_and_headers(server, listener, path)
    assert (status, reason, headers["connection"]) == expected
    assert headers["content-type"] == "application/json"
    assert headers["x-request-id"]
    assert headers.items() >= NO_CACHE.items()
    assert not headers.keys() & {"Server", "Date", "server", "date"}


def test_an_error_body_to_the_byte(server):
    assert server.predict("nobody").text == (
        '{\n  "code": 404,\n  "type": "ModelNotFoundException",\n'
        '  "message": "Model not found: nobody"\n}\n'
    )


def test_ping_to_the_byte(server):
    assert server.inference("GET", "/ping").text == '{\n  "status": "Healthy"\n}\n'


LAB = "/predictions/lab"


@pytest.mark.parametrize("chunked", [False, True])
def test_an_error_whose_body_was_read_keeps_the_connection(server, chunked):
    """The head and the body are sent one after the other, as Python's clients do."""
    cases = [
        ("inference", "POST", LAB, {"X-Timeout-Ms": "soon"}, {}, 400),
        ("inference", "POST", "/predictions/nobody", {}, {}, 404),
        ("inference", "POST", LAB, {}, {"status": [429, "Too Many"], "answer": "plain"}, 429),
        ("inference", "POST", LAB, {}, {"do": "raise"}, 503),
        ("management", "PATCH", "/models", {}, {}, 405),
    ]
    connections = {
        name: http.client.HTTPConnection("127.0.0.1", server.ports[name], timeout=20)
        for name in ("inference", "management")
    }
    for connection in connections.values():
        connection.connect()
        connection.auto_open = False
    for _ in range(3):
        for listener, method, path, headers, orders, status in cases:
            connection = connections[listener]
            body = json.dumps(orders).encode()
            headers = {"Content-Type": "application/json", **headers}
            sent = iter([body]) if chunked else body
            connection.request(method, path, sent, headers, encode_chunked=chunked)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status
            if chunked and status < 429:  # refused before the body is read
                connection.close()
                connection.connect()
    for connection in connections.values():
        connection.close()


def test_an_error_before_a_long_body_closes_the_connection(server):
    with server.connect("inference") as connection:
        connection.sendall(
            b"POST /predictions/nobody HTTP/1.1\r\nHost: h\r\nContent-Length: 1000000\r\n\r\nx"
        )
        assert b"connection: close" in connection.recv(65536)


def test_the_client_may_close_the_connection(server):
    answer = server.exchange(
        "inference", b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")  # and `exchange` has seen the end


def test_each_of_a_batch_gets_its_own_answer(server, together):
    orders = [
        {"answer": "plain", "headers": {"X-Mine": "one"}},
        {"answer": "teapot", "status": [418, "My Phrase"], "type": "text/plain"},
        {"answer": {"a": 1}, "status": [201], "type": "application/json"},
    ]
    plain, teapot, created = together([lambda o=o: server.ask("batch3", **o) for o in orders])
    assert (plain.status_code, plain.text, plain.headers["X-Mine"]) == (200, "plain", "one")
    assert (teapot.status_code, teapot.reason, teapot.text) == (418, "My Phrase", "teapot")
    assert teapot.headers["content-type"] == "text/plain"
    assert (created.status_code, created.json()) == (201, {"a": 1})
    assert "X-Mine" not in created.headers
    assert len({item.headers["x-request-id"] for item in (plain, teapot, created)}) == 3


@pytest.mark.parametrize(
    "order",
    [
        {"headers": {"X-Split": "a\r\nX-Evil: 1"}},
        {"status": [200, "a\r\nX-Evil: 1"]},
        {"status": [42]},
        {"status": [200, "x" * 70_000]},
        {"headers": {"X-Long": "x" * 70_000}},
        {"headers": {f"X-{number}": "" for number in range(1001)}},
    ],
)
def test_an_answer_that_would_break_http_is_not_sent(server, order):
    answer = server.ask("lab", **order)
    assert answer.status_code in (500, 503)
    assert answer.json()["type"] == "InternalServerException"
    assert "X-Evil" not in answer.headers


def test_a_handler_cannot_change_the_framing(server):
    framing = {"Content-Length": "1", "Transfer-Encoding": "chunked", "Connection": "upgrade"}
    answer = server.ask("lab", answer="whole", headers=framing)
    assert (answer.status_code, answer.text) == (200, "whole")


def test_cors_headers_when_configured(start_server):
    origin = {"cors_allowed_origin": "https://a.example", "cors_allowed_methods": "GET, POST"}
    with start_server(**origin) as server:
        for answer in (server.inference("GET", "/ping"), server.predict("nobody")):
            assert answer.headers["access-control-allow-origin"] == "https://a.example"
            assert answer.headers["access-control-allow-methods"] == "GET, POST"
            assert "access-control-allow-headers" not in answer.headers
        assert server.inference("OPTIONS", "/predictions/nobody").status_code == 404
        assert server.management("OPTIONS", "/models").status_code == 200


def test_an_answer_beyond_max_response_size(start_server):
    with start_server(max_response_size="1000") as server:
        server.install(EVERY_TYPE, "types")
        text = {"Content-Type": "text/plain"}
        answer = server.predict("types", data="large", headers=text)
        assert answer.status_code == 500
        assert json.loads(answer.text)["type"] == "InternalServerException"
        assert server.predict("types", data="int", headers=text).text == "7"
