"""What the handler sees of every form of request."""

import json
import re
import subprocess

import pytest

pytestmark = pytest.mark.integration

FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module", autouse=True)
def probe(server, handlers):
    server.install(handlers / "probe.py", "probe")


def seen(answer):
    assert answer.status_code == 200, answer.text
    return json.loads(answer.text)


@pytest.mark.parametrize(
    ("kind", "body", "data"),
    [
        ("", b"\x00\xffraw", ["bytearray", "\x00\xffraw"]),
        ("application/octet-stream", b"\x00\xffraw", ["bytearray", "\x00\xffraw"]),
        ("image/jpeg", b"\xff\xd8", ["bytearray", "\xff\xd8"]),
        ("application/json", b'{"a": [1, null]}', ["dict", {"a": [1, None]}]),
        ("application/json; charset=utf-8", b"[1, 2]", ["list", [1, 2]]),
        ("application/json", b"{broken", ["bytearray", "{broken"]),
        ("text/plain", "grüße".encode(), ["str", "grüße"]),
        ("text/csv; charset=utf-8", b"a,b", ["str", "a,b"]),
        ("text/plain", b"\xff", ["bytearray", "\xff"]),
        ("multipart/form-data", b"no boundary", ["bytearray", "no boundary"]),
        ("", b"", ["bytearray", ""]),
        ("application/json", b"", ["bytearray", ""]),
    ],
)
def test_a_body_arrives_by_its_content_type(server, kind, body, data):
    headers = {"Content-Type": kind} if kind else {}
    assert seen(server.predict("probe", data=body, headers=headers))["data"] == {"body": data}


@pytest.mark.parametrize(
    ("body", "data"),
    [
        (b"a=1&b=two+words%21", {"a": ["bytearray", "1"], "b": ["bytearray", "two words!"]}),
        (b"a=1&a=2", {"a": ["bytearray", "2"]}),
        (b"hello", {}),
        (b"a=", {"a": ["bytearray", ""]}),
    ],
)
def test_fields_of_a_form(server, body, data):
    answer = server.predict("probe", data=body, headers={"Content-Type": FORM})
    assert seen(answer)["data"] == data


def test_parts_of_a_multipart_body(server):
    answer = server.predict(
        "probe",
        files=[
            ("data", ("cat.jpg", b"\xff\xd8", "image/jpeg")),
            ("labels", ("labels.json", b'["cat"]', "application/json")),
            ("note", ("note.txt", "für dich".encode(), "text/plain")),
            ("plain", (None, b"no file", "text/plain")),
            ("twice", (None, b"first")),
            ("twice", (None, b"last")),
        ],
    )
    found = seen(answer)
    assert found["data"] == {
        "data": ["bytearray", "\xff\xd8"],
        "labels": ["list", ["cat"]],
        "note": ["str", "für dich"],
        "plain": ["bytearray", "no file"],
        "twice": ["bytearray", "last"],
    }
    assert found["headers"]["data"] == {"content-type": "image/jpeg"}


@pytest.mark.parametrize(
    "body",
    [
        b"--edge\r\nno header",
        b"--other\r\n\r\nx\r\n--other--",
        b"--edge\r\n\r\nnameless\r\n--edge--",
    ],
)
def test_a_broken_multipart_body_is_refused(server, body):
    headers = {"Content-Type": "multipart/form-data; boundary=edge"}
    answer = server.predict("probe", data=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["type"] == "BadRequestException"


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE", "PATCH"])
def test_every_method_predicts(server, method):
    assert seen(server.inference(method, "/predictions/probe"))["data"] == {
        "body": ["bytearray", ""]
    }


def test_head_predicts_without_a_body(server):
    answer = server.inference("HEAD", "/predictions/probe")
    assert answer.status_code == 200
    assert int(answer.headers["content-length"]) > 0
    assert answer.content == b""


@pytest.mark.parametrize("size", [1000, 2_000_000])  # from 1 MB on, curl asks before it sends
@pytest.mark.parametrize("way", [["-T"], ["--data-binary"]])
def test_curl_sends_a_file(server, tmp_path, way, size):
    file = tmp_path / "picture.bin"
    file.write_bytes(b"x" * size)
    argument = str(file) if way == ["-T"] else f"@{file}"
    url = f"http://127.0.0.1:{server.ports['inference']}/predictions/probe"
    octets = ["-H", "Content-Type: application/octet-stream"]
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "20", *octets, *way, argument, url],
        capture_output=True,
        check=True,
    )
    kind, value = json.loads(done.stdout)["data"]["body"]
    assert (kind, len(value)) == ("bytearray", size)


def test_expect_continue_is_answered_before_the_body(server):
    with server.connect("inference") as connection:
        connection.sendall(
            b"POST /predictions/probe HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert connection.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.sendall(b"hello")
        assert b'"hello"' in connection.recv(65536)


def test_a_chunked_body(server):
    answer = server.predict("probe", data=iter([b"one ", b"two"]))
    assert seen(answer)["data"] == {"body": ["bytearray", "one two"]}


def test_headers_reach_the_handler_in_the_clients_case(server):
    headers = {"X-CamelCase-Header": "Value", "x-request-id": "mine"}
    found = seen(server.predict("probe", data=b"x", headers=headers))["headers"]
    assert found["X-CamelCase-Header"] == "Value"
    assert found["x-request-id"] == "mine"
    assert found["explain"] == "False"
    assert found["url_path"] == ""
    assert found["body"] == {"content-type": ""}


def test_a_request_without_a_body_has_length_0(server):
    headers = seen(server.inference("GET", "/predictions/probe"))["headers"]
    assert headers["content-length"] == "0"


@pytest.mark.parametrize(
    ("path", "url_path"),
    [
        ("/predictions/probe", ""),
        ("/predictions/probe/", ""),
        ("/predictions/probe/1.0", ""),
        ("/predictions/probe/1.0/", ""),
        ("/predictions/pro%62e", ""),
        ("/predictions/probe%2F1.0", ""),
        ("/predictions/probe/1.0/v1/chat/completions", "v1/chat/completions"),
        ("/predictions/probe?model=other", ""),
    ],
)
def test_the_path_names_model_version_and_rest(server, path, url_path):
    assert seen(server.inference("POST", path))["headers"]["url_path"] == url_path


def test_the_query_is_not_for_the_handler(server):
    assert seen(server.inference("GET", "/predictions/probe?a=1"))["data"].keys() == {"body"}


def test_the_handler_knows_the_id_of_the_answer(server):
    answer = server.predict("probe", headers={"X-Request-Id": "mine"})
    assert seen(answer)["id"] == answer.headers["x-request-id"]
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", seen(answer)["id"])


def test_one_connection_carries_many_requests(server):
    request = b"POST /predictions/probe HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\n%d"
    last = b"GET /predictions/nobody HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    pipelined = b"".join(request % number for number in range(5)) + last
    answers = server.exchange("inference", pipelined)
    assert re.findall(rb'"bytearray",\s+"(\d)"', answers) == [b"0", b"1", b"2", b"3", b"4"]
    assert answers.count(b"HTTP/1.1 200 ") == 5
    assert b"HTTP/1.1 404 " in answers


def test_undecoded_when_the_module_of_the_handler_says_so(server, handlers):
    own = "import os\nos.environ['TS_DECODE_INPUT_REQUEST'] = 'false'\n"
    server.install(own + (handlers / "probe.py").read_text(), "undecoded")
    assert seen(server.predict("undecoded", json={}))["data"] == {"body": ["bytearray", "{}"]}
    assert seen(server.predict("probe", json={}))["data"]["body"][0] == "dict"


def test_undecoded_when_the_server_says_so(start_server, handlers):
    with start_server(decode_input_request="false") as server:
        server.install(handlers / "probe.py", "probe")
        assert seen(server.predict("probe", json={}))["data"] == {"body": ["bytearray", "{}"]}
