"""What a handler is given for every form of request: values, their types, headers, metadata."""

import json

import pytest

pytestmark = pytest.mark.integration

JSON = "application/json"
FORM = "application/x-www-form-urlencoded"
EDGE = "multipart/form-data; boundary=edge"


def seen(answer):
    assert (answer.status, answer.reason) == (200, ""), answer.body
    return json.loads(answer.body)


def raw(text):
    return ["bytearray", text]


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        ("", b"\x00\xffraw", raw("\x00\xffraw")),
        ("application/octet-stream", b"\x00\xff", raw("\x00\xff")),
        ("image/jpeg", b"\xff\xd8", raw("\xff\xd8")),
        ("application/octet-stream", b"", raw("")),
        (JSON, b'{"a": [1, null]}', ["dict", {"a": [1, None]}]),
        (JSON, b'"text"', ["str", "text"]),
        (JSON, b"1e999", ["float", float("inf")]),
        (f"{JSON}; charset=utf-8", b"[1, 2]", ["list", [1, 2]]),
        (JSON, b"{broken", raw("{broken")),
        (JSON, b"", raw("")),
        (JSON, b"\xff", raw("\xff")),
        ("Application/JSON", b"[1]", raw("[1]")),
        ("application/jsonl", b"[1]", raw("[1]")),
        ("application/vnd.api+json", b"[1]", raw("[1]")),
        ("text/plain", "grüße".encode(), ["str", "grüße"]),
        ("text/plain", b"", ["str", ""]),
        ("text/csv; charset=utf-8", b"a,b", ["str", "a,b"]),
        ("text/plain", b"\xff", raw("\xff")),
        ("Text/Plain", b"x", raw("x")),
        ("text", b"x", ["str", "x"]),
        ("textual/thing", b"x", ["str", "x"]),
        ("multipart/form-data", b"no boundary", raw("no boundary")),
        ("multipart/mixed; boundary=edge", b"--edge--", raw("--edge--")),
    ],
)
def test_a_body(ask, kind, body, value):
    found = seen(ask("POST /predictions/probe", body, kind))
    assert found["data"] == {"body": value}
    assert found["headers"]["body"] == {"content-type": kind.partition(";")[0]}


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b"a=1&b=two+words%21", {"a": "1", "b": "two words!"}),
        (b"a=1&a=2", {"a": "2"}),
        (b"a=b=c", {"a": "b=c"}),
        (b"%61=%ff", {"a": "\xff"}),
        (b"a=", {"a": ""}),
        (b"hello", {}),
        (b"a=1&hello", {"a": "1"}),
        (b'{"a": 1}', {}),
        (b"", {}),
    ],
)
def test_a_form(ask, body, data):
    found = seen(ask("POST /predictions/probe", body, FORM))
    assert found["data"] == {name: raw(text) for name, text in data.items()}


def part(name, content, *lines, file=""):
    name += f'"; filename="{file}' if file else ""
    return "\r\n".join([f'Content-Disposition: form-data; name="{name}"', *lines, "", content])


def multipart(*parts):
    return "".join(f"--edge\r\n{item}\r\n" for item in parts) + "--edge--\r\n"


@pytest.mark.parametrize(
    ("parts", "data", "kind"),
    [
        ([part("d", "x", "Content-Type: image/jpeg", file="f")], {"d": raw("x")}, "image/jpeg"),
        ([part("d", "[1]", f"Content-Type: {JSON}", file="f")], {"d": ["list", [1]]}, JSON),
        ([part("d", "{", f"Content-Type: {JSON}", file="f")], {"d": raw("{")}, JSON),
        (
            [part("d", "[1]", f"Content-Type: {JSON}; charset=utf-8", file="f")],
            {"d": ["list", [1]]},
            JSON,
        ),
        (
            [part("d", "x", "Content-Type: text/plain", file="f")],
            {"d": ["str", "x"]},
            "text/plain",
        ),
        ([part("d", "x", file="f")], {"d": raw("x")}, "application/octet-stream"),
        ([part("d", "x")], {"d": raw("x")}, ""),
        ([part("d", "[1]", f"Content-Type: {JSON}")], {"d": raw("[1]")}, ""),
        ([part("d", "1"), part("d", "2")], {"d": raw("2")}, ""),
        ([part("d", "")], {"d": raw("")}, ""),
        ([part("d", "", "Content-Type: image/jpeg", file="f")], {"d": raw("")}, "image/jpeg"),
    ],
)
def test_a_multipart_body(ask, parts, data, kind):
    found = seen(ask("POST /predictions/probe", multipart(*parts), EDGE))
    assert found["data"] == data
    assert found["headers"]["d"] == {"content-type": kind}


@pytest.mark.parametrize(
    ("path", "url_path"),
    [
        ("probe", ""),
        ("probe/", ""),
        ("probe/1.0", ""),
        ("pro%62e", ""),
        ("probe%2F1.0", ""),
        ("probe/1.0/v1/chat/completions", "v1/chat/completions"),
        ("probe/1.0/a%20b", "a b"),
        ("probe/1.0/a+b", "a+b"),
        ("probe/1.0/a//b", "a//b"),
        ("probe/1.0/a/b/", "a/b"),
        ("probe/1.0/gr%C3%BC%C3%9Fe?a=1", "grüße"),
    ],
)
def test_the_rest_of_the_path(ask, path, url_path):
    assert seen(ask(f"POST /predictions/{path}", b"x"))["headers"]["url_path"] == url_path


@pytest.mark.parametrize(
    ("line", "headers"),
    [
        ("GET /predictions/probe", {"content-length": "0", "url_path": "", "explain": "False"}),
        ("DELETE /predictions/probe", {"content-length": "0", "url_path": "", "explain": "False"}),
        ("GET /explanations/probe", {"content-length": "0", "url_path": "", "explain": "True"}),
        ("GET /v1/models/probe:predict", {"content-length": "0", "explain": "False"}),
        ("GET /v1/models/probe:explain", {"content-length": "0", "explain": "True"}),
        ("GET /v2/models/probe/infer", {"content-length": "0", "explain": "False"}),
        ("GET /v2/models/probe/explain", {"content-length": "0", "explain": "True"}),
        ("GET /models/probe/invoke", {"content-length": "0"}),
        ("GET /probe/predict", {"content-length": "0"}),
        ("GET /probe/1.0/predict", {"content-length": "0"}),
    ],
)
def test_all_headers_of_a_request_without_a_body(ask, line, headers):
    found = seen(ask(line))
    assert found["headers"] == {"Host": "127.0.0.1", "body": {"content-type": ""}, **headers}
    assert found["data"] == {"body": raw("")}


@pytest.mark.parametrize(
    ("line", "data"),
    [
        ("POST /predictions/probe?a=1", {}),
        ("POST /v1/models/probe:predict?a=1", {}),
        ("POST /v2/models/probe/infer?a=1", {}),
        ("POST /invocations?model_name=probe&a=1", {"model_name": "probe", "a": "1"}),
        ("POST /models/probe/invoke?a=1&a=2", {"a": "2"}),
        ("POST /probe/predict?b=two+words", {"b": "two words"}),
    ],
)
def test_which_routes_hand_the_query_on(ask, line, data):
    found = seen(ask(line, "hello", "text/plain"))
    expected = {name: raw(text) for name, text in data.items()} | {"body": ["str", "hello"]}
    assert found["data"] == expected
    assert list(found["data"]) == list(expected)  # the query comes first


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("model_name=probe&a=1", FORM),
        (multipart(part("model_name", "probe"), part("a", "1")), EDGE),
    ],
)
def test_an_invocation_whose_model_is_named_by_the_form(ask, body, kind):
    found = seen(ask("POST /invocations", body, kind))
    assert found["data"] == {"model_name": raw("probe"), "a": raw("1")}


def test_headers_in_the_clients_case_and_the_last_of_two(ask):
    headers = {"X-CamelCase": "Value", "x-request-id": "mine", "X-Empty": ""}
    answer = ask("POST /predictions/probe", b"x", headers=headers)
    found = seen(answer)
    assert {name: found["headers"][name] for name in headers} == headers
    assert found["id"] == answer.header("x-request-id") != "mine"
